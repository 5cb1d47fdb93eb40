"""`lz.mla_paged_attention`: multi-head latent attention (DeepSeek) over a paged cache of latent vectors."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from layerzero._ops.bucketed import batch_key
from layerzero._ops.paged import check_pages
from layerzero._ops.signature import declare, keyed
from layerzero.errors import invalid
from layerzero.model.checks import context_of, expect_rank
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating, check_scale, dtype_name
from layerzero.model.enums import Causal
from layerzero.model.kv_cache import PagedBatch
from layerzero.model.op import Call
from layerzero.model.shapes import with_lse


@overload
def mla_paged_attention(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, batch: PagedBatch, *, scale: float,
    return_lse: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def mla_paged_attention(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, batch: PagedBatch, *, scale: float,
    return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def mla_paged_attention(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, batch: PagedBatch, *, scale: float,
    return_lse: bool, backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def mla_paged_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Latent attention of absorbed queries over pages of latent vectors and rotated keys; gives [tokens, H, ckv].

    q_nope [tokens, H, ckv] is the query after the key's up-projection, q_pe [tokens, H, kpe] its rotated part;
    ckv_cache is [blocks, page, ckv], kpe_cache [blocks, page, kpe] (512 and 64 in DeepSeek-V2 and V3, any size here).
    The score of a token is q_nope · ckv + q_pe · kpe, times `scale`, which no shape here tells: 1 / sqrt(128 + 64) for
    DeepSeek, where 128 is the width before absorption. The result is still to be multiplied by the value's
    up-projection.

    `batch` is a `lz.paged_batch`. Causal, bottom-right aligned: the last query token of a sequence sees its whole
    context. `return_lse=True` gives (out, lse): natural log, float32, [tokens, H].
    """
    check_scale(scale)
    args = (q_nope, q_pe, ckv_cache, kpe_cache, batch, scale, return_lse)
    return keyed(MLA_PAGED_ATTENTION, _key, args, None, backend)


def _expect_batch(batch: Any) -> None:
    if not isinstance(batch, PagedBatch):
        raise invalid("TYPE_INVALID", f"batch: {type(batch).__name__}", "a PagedBatch, made by lz.paged_batch")


def _lengths(q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, batch: Any, *rest: Any) -> tuple[Any, int]:
    _expect_batch(batch)
    check_pages(ckv_cache, batch, 3, 1)
    return (batch.max_query_len, batch.max_context_len), batch.total_q


def _describe(call: Call) -> Context:
    q_nope, q_pe, ckv_cache, kpe_cache, batch, scale, return_lse = call.args
    _expect_batch(batch)
    named = (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache))
    for name, item in named:
        expect_rank(item, name, (3,))
    check_devices(**dict(named), block_tables=batch.block_tables)
    words = {name: check_floating(item, name) for name, item in named}
    if scale is None:
        raise invalid("TYPE_INVALID", "scale: NoneType", "a number")
    check_scale(scale)
    if words["kpe_cache"] != words["ckv_cache"]:
        raise invalid("KV_CACHE_DTYPE_MISMATCH", f"kpe {words['kpe_cache']}", f"ckv {words['ckv_cache']}")
    tokens, heads, latent = q_nope.shape
    blocks, page, width = ckv_cache.shape
    _same("q_nope and q_pe", q_pe.shape[:2], (tokens, heads), q_pe)
    _same("ckv_cache and kpe_cache", kpe_cache.shape[:2], (blocks, page), kpe_cache)
    for names, left, right in (
        ("q_nope and ckv_cache", latent, width),
        ("q_pe and kpe_cache", q_pe.shape[2], kpe_cache.shape[2]),
    ):
        if left != right:
            raise invalid("HEAD_DIM_MISMATCH", left, right, f"{names} disagree")
    if 0 in (heads, latent, page):
        shown = f"{tuple(q_nope.shape)} over {tuple(ckv_cache.shape)}"
        raise invalid("SHAPE_INVALID", shown, "at least one head, one latent channel and one token a page")
    if tokens != batch.total_q:
        raise invalid("SHAPE_INVALID", f"of {tokens} query tokens", f"the batch: {batch.total_q} from query_lens")
    check_pages(ckv_cache, batch, 3, 1)
    needs = {
        "lse": return_lse,
        "lse_backward": return_lse and call.needs_grad,
        "paged_prefill": not batch.is_decode,
    }
    dims = {
        "batch": batch.batch_size,
        "tokens": tokens,
        "num_heads": heads,
        "head_dim_ckv": latent,
        "head_dim_kpe": q_pe.shape[2],
        "seq_len_q": batch.max_query_len,
        "seq_len_k": batch.max_context_len,
        "page_size": page,
        "num_blocks": blocks,
    }
    return context_of(
        call,
        "mla_paged_attention",
        words["q_nope"],
        dims,
        needs,
        (q_nope, q_pe, ckv_cache, kpe_cache),
        dtypes=(words["q_nope"], words["q_pe"]),
        rank=3,
        causal=Causal.BOTTOM_RIGHT,
        kv_cache_dtype=words["ckv_cache"],
        index_dtype=dtype_name(batch.block_tables),
        scale=scale,
    )


def _same(names: str, found: Any, wanted: tuple[int, ...], tensor: Tensor) -> None:
    if tuple(found) != wanted:
        raise invalid("SHAPE_INVALID", str(tuple(tensor.shape)), f"{list(wanted)} in front", f"{names} disagree")


MLA_PAGED_ATTENTION = declare(
    function=mla_paged_attention,
    fake=lambda q_nope, *rest: with_lse(q_nope.new_empty(q_nope.shape), rest[-1]),
    describe=_describe,
    reference="layerzero.backends.reference.varlen:mla_paged_attention",
    cost=Roofline(
        "element_bytes * tokens * num_heads * (2 * head_dim_ckv + head_dim_kpe) "
        "+ cache_bytes * batch * seq_len_k * (head_dim_ckv + head_dim_kpe) "
        "+ index_bytes * batch * (2 + ceil(seq_len_k / page_size))",
        "2 * tokens * num_heads * keys_seen * (2 * head_dim_ckv + head_dim_kpe)",
    ),
    shapes={
        "q": "tokens,num_heads,head_dim_ckv",
        "k": "num_blocks,page_size,head_dim_ckv",
        "head_dim_kpe": "64",
        "batch": "tokens",
        "seq_len_q": "1",
        "seq_len_k": "max(1, num_blocks // max(1, tokens)) * page_size",
    },
    options=("context", "lse"),
    example="layerzero._ops.examples_attention:latent",
    tolerance="attention",
    growing=("seq_len_q", "seq_len_k"),
)

_key = batch_key(MLA_PAGED_ATTENTION, _lengths)
