"""`lz.paged_attention` over a paged KV cache, and `lz.paged_batch`, planned once per batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from layerzero._ops.bucketed import batch_key
from layerzero._ops.signature import declare, keyed
from layerzero.dispatch import modes
from layerzero.dispatch.hot import needs_grad
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_rank, expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import (
    attention_needs,
    check_devices,
    check_floating,
    check_per_head,
    check_scale,
    check_softcap,
    dtype_name,
    parse_layout,
    parse_window,
)
from layerzero.model.enums import Causal, Layout
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.op import Call
from layerzero.model.shapes import with_lse


def paged_batch(
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    query_lens: Tensor | None = None,
    host_lens: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None,
    capture: bool = False,
    cross: bool = False,
) -> PagedBatch:
    """Plan a batch once, for all layers: page numbers [B, blocks], KV lengths [B], new tokens [B] (one each if None).

    `host_lens` gives the lengths as Python numbers where the caller has them already, which saves a copy
    from the device. Kernels that plan do so at the first call with the batch and keep the plan in it.

    For CUDA graphs: `capture=True`, one call of each op outside of the graph, which plans, then the capture. Before a
    replay with other lengths or pages, `batch.update(block_tables, context_lens)` plans again into the same buffers.
    The batch has to live as long as its graph.

    `cross=True` is for cross-attention: the context is another sequence, and may be shorter than the queries. Such a
    batch is attended with `is_causal=False`.
    """
    return make_paged_batch(block_tables, context_lens, query_lens, host_lens, capture, cross)


@overload
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch | Tensor,
    context_lens: Tensor | None = ..., *, scale: float | None = ..., layout: str = ...,
    window: int | Sequence[int] | None = ..., softcap: float | None = ..., alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ..., is_causal: bool = ..., k_scale: float | Tensor | None = ...,
    v_scale: float | Tensor | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch | Tensor,
    context_lens: Tensor | None = ..., *, scale: float | None = ..., layout: str = ...,
    window: int | Sequence[int] | None = ..., softcap: float | None = ..., alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ..., is_causal: bool = ..., k_scale: float | Tensor | None = ...,
    v_scale: float | Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch | Tensor,
    context_lens: Tensor | None = ..., *, scale: float | None = ..., layout: str = ...,
    window: int | Sequence[int] | None = ..., softcap: float | None = ..., alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ..., is_causal: bool = ..., k_scale: float | Tensor | None = ...,
    v_scale: float | Tensor | None = ..., return_lse: bool, backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch | Tensor,
    context_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    layout: str = "NHD",
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = True,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention of query [tokens, Hq, D] over pages [blocks, page, Hkv, D] (NHD) or [blocks, Hkv, page, D] (HND).

    Causal, bottom-right aligned: the last query token of a sequence sees its whole context. `batch` is a
    `lz.paged_batch`; the form `(…, block_tables, context_lens)` also works and plans at every call. With
    `is_causal=False` every query sees the whole context, which may be shorter than the queries (cross-attention).
    `sinks` [Hq] as in `lz.attention`. `k_scale` and `v_scale` are what the numbers of the caches are multiplied by
    (FP8 caches): one number, or a tensor of one or of Hkv numbers.
    """
    planned = _planned(batch, context_lens)
    check_scale(scale)
    check_softcap(softcap)
    sides = parse_window(window)
    args = (query, key_cache, value_cache, planned, scale, sides, softcap, alibi_slopes, return_lse, layout)
    if sinks is not None or is_causal is not True or k_scale is not None or v_scale is not None:
        causal = _causal(is_causal, planned, sides)
        args = PAGED_ATTENTION.shorten((*args, sinks, causal, k_scale, v_scale))
    return keyed(PAGED_ATTENTION, _key, args, layout, backend)


def _causal(is_causal: Any, batch: PagedBatch, window: tuple[int, int] | None) -> bool:
    """Whether a query may not see the keys behind its own; one query a sequence has none behind it."""
    if not isinstance(is_causal, bool):
        raise invalid("TYPE_INVALID", f"is_causal: {type(is_causal).__name__}", "True or False")
    return is_causal or (batch.is_decode and window is None)


def _planned(batch: Any, context_lens: Any) -> PagedBatch:
    if isinstance(batch, PagedBatch):
        return batch
    if context_lens is None:
        raise invalid("TYPE_INVALID", "no context_lens", "a paged_batch, or block_tables and context_lens")
    return make_paged_batch(expect_tensor(batch, "block_tables"), expect_tensor(context_lens, "context_lens"))


def check_pages(cache: Any, batch: PagedBatch, rank: int, axis: int | None) -> None:
    """Every context must fit its row of pages (tokens along `axis` of the cache); asked at each call: lengths grow."""
    if not isinstance(cache, Tensor) or cache.ndim != rank or axis is None:
        return  # refused with its own words on the cold path
    rows, page = batch.block_tables.shape[1], cache.shape[axis]
    if batch.max_context_len > rows * page:
        raise invalid("BLOCK_TABLE_INVALID", f"context of {batch.max_context_len}", f"{rows} pages of {page}")
    if batch.block_tables.is_cpu and modes.plain((batch.block_tables,)):
        batch.check_page_numbers(page, cache.shape[0])


_TOKENS = {"NHD": 1, "HND": 2}  # the axis of a page's tokens


def _lengths(query: Any, key_cache: Any, value_cache: Any, batch: PagedBatch, *rest: Any) -> tuple[Any, int]:
    # One integer dtype for all metadata: kernels read the tensors side by side.
    dtype, new = batch.block_tables.dtype, batch.query_lens
    if batch.context_lens.dtype is not dtype or not (new is None or new.dtype is dtype):
        words = {"block_tables": batch.block_tables, "context_lens": batch.context_lens, "query_lens": new}
        shown = ", ".join(f"{name} {dtype_name(tensor)}" for name, tensor in words.items() if tensor is not None)
        raise invalid("BLOCK_TABLE_DTYPE", shown, "one of int32, int64", f"the metadata has different dtypes: {shown}")
    check_pages(key_cache, batch, 4, _TOKENS.get(rest[5]))
    return (batch.max_query_len, batch.max_context_len), batch.total_q


def _describe(call: Call) -> Context:
    args = PAGED_ATTENTION.lengthen(call.args)
    query, key_cache, value_cache, batch, scale, window, softcap, slopes, return_lse, layout, *last = args
    sinks, is_causal, k_scale, v_scale = last
    for name, item, rank in (("query", query, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4)):
        expect_rank(item, name, (rank,))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    check_devices(
        query=query, key_cache=key_cache, value_cache=value_cache, block_tables=batch.block_tables, alibi_slopes=slopes,
        sinks=sinks, **{name: item for name, item in scales.items() if isinstance(item, Tensor)},
    )  # fmt: skip
    word = check_floating(query, "query")
    cache_word = check_floating(key_cache, "key_cache")
    if dtype_name(value_cache) != cache_word:
        raise invalid("KV_CACHE_DTYPE_MISMATCH", f"value {dtype_name(value_cache)}", f"key {cache_word}")
    order = parse_layout(layout)
    if order not in (Layout.NHD, Layout.HND):
        raise invalid("LAYOUT_UNKNOWN", order.value, "NHD, HND")
    blocks, first, second, dim = key_cache.shape
    page, kv_heads = (first, second) if order is Layout.NHD else (second, first)
    if tuple(value_cache.shape[:3]) != tuple(key_cache.shape[:3]):
        raise invalid("SHAPE_INVALID", f"value_cache {tuple(value_cache.shape)}", f"key_cache {tuple(key_cache.shape)}")
    tokens, heads, query_dim = query.shape
    if query_dim != dim:
        raise invalid("HEAD_DIM_MISMATCH", f"query {query_dim}, cache {dim}", "equal")
    if kv_heads == 0 or heads % kv_heads:
        raise invalid("GQA_RATIO_INVALID", heads, kv_heads)
    if tokens != batch.total_q:
        raise invalid("SHAPE_INVALID", f"of {tokens} query tokens", f"the batch: {batch.total_q} from query_lens")
    check_pages(key_cache, batch, 4, _TOKENS[order])
    check_softcap(softcap)
    if is_causal and batch.is_cross:
        raise invalid("BLOCK_TABLE_INVALID", "with more queries than context", "is_causal=False")
    check_per_head(slopes, sinks, heads, batch.batch_size)
    for name, item in scales.items():
        if isinstance(item, Tensor):
            check_floating(item, name)
            if item.numel() != 1 and tuple(item.shape) != (kv_heads,):
                raise invalid("SHAPE_INVALID", f"{name} {tuple(item.shape)}", f"one number, or [{kv_heads}]")
        elif item is not None and not (isinstance(item, (int, float)) and math.isfinite(item)):
            raise invalid("VALUE_INVALID", f"{name}={item}", "a finite number, a tensor, or None")
    gqa = heads != kv_heads
    needs = {
        **attention_needs(call.needs_grad, gqa, Causal.NONE, window, softcap, slopes, sinks, return_lse),
        "mask_grad": call.needs_grad and any(map(needs_grad, (slopes, k_scale, v_scale))),
        "paged_prefill": not batch.is_decode,
        "kv_scales": k_scale is not None or v_scale is not None,
        "non_causal": not is_causal,
    }
    dims = {
        "batch": batch.batch_size,
        "tokens": tokens,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "head_dim_v": value_cache.shape[3],
        "seq_len_q": batch.max_query_len,
        "seq_len_k": batch.max_context_len,
        "page_size": page,
        "num_blocks": blocks,
    }
    return context_of(
        call,
        "paged_attention",
        word,
        dims,
        needs,
        (query, key_cache, value_cache),
        dtypes=(word,),
        rank=3,
        causal=Causal.BOTTOM_RIGHT if is_causal else Causal.NONE,
        window=window,
        kv_cache_dtype=cache_word,
        kv_cache_layout=order,
        index_dtype=dtype_name(batch.block_tables),
        scale=scale,
    )


def _canonical(given: dict[str, Any]) -> tuple[Any, ...]:
    batch, sides = _planned(given["batch"], given["context_lens"]), parse_window(given["window"])
    told = {**given, "batch": batch, "window": sides, "is_causal": _causal(given["is_causal"], batch, sides)}
    return tuple(told[name] for name in PAGED_ATTENTION.arguments)


PAGED_ATTENTION = declare(
    function=paged_attention,
    fake=lambda query, key, value, *rest: with_lse(query.new_empty((*query.shape[:2], value.shape[-1])), rest[-1]),
    arguments=(
        "query", "key_cache", "value_cache", "batch", "scale", "window", "softcap", "alibi_slopes", "return_lse",
        "layout", "sinks", "is_causal", "k_scale", "v_scale",
    ),
    trailing=4,
    describe=_describe,
    reference="layerzero.backends.reference.varlen:paged_attention",
    cost=Roofline(
        "(head_dim + head_dim_v) * (element_bytes * tokens * num_heads "
        "+ cache_bytes * batch * seq_len_k * num_kv_heads) "
        "+ index_bytes * batch * (2 + ceil(seq_len_k / page_size))",
        "2 * tokens * num_heads * keys_seen * (head_dim + head_dim_v)",
    ),
    shapes={
        "q": "tokens,num_heads,head_dim",
        "k": "num_blocks,page_size,num_kv_heads,head_dim",
        "batch": "max(1, tokens)",
        "seq_len_q": "1",
        "seq_len_k": "max(1, num_blocks // batch) * page_size",
    },
    options=("layout", "context", "window", "softcap", "lse", "alibi", "sinks"),
    example="layerzero._ops.examples_attention:paged",
    tolerance="attention",
    growing=("seq_len_q", "seq_len_k"),
    canonical=_canonical,
)  # fmt: skip

_key = batch_key(PAGED_ATTENTION, _lengths)
