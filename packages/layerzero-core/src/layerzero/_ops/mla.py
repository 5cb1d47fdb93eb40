"""`lz.mla_paged_attention`: multi-head latent attention (DeepSeek) over a paged cache of latent vectors."""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import Any, Literal, overload

import torch
from torch import Tensor

from layerzero._ops.signature import register
from layerzero.dispatch import modes
from layerzero.dispatch.hot import describe_tensor, mode_key, traced, watched
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.errors import InvalidInputError
from layerzero.model.checks import expect_rank, expect_tensor
from layerzero.model.context import Context
from layerzero.model.cost import Roofline
from layerzero.model.describe import check_devices, check_floating, check_scale, dtype_name, stride_class
from layerzero.model.enums import Causal
from layerzero.model.kv_cache import PagedBatch
from layerzero.model.op import Call, Op
from layerzero.model.shapes import with_lse

__all__ = ["MLA_PAGED_ATTENTION", "mla_paged_attention"]

_grad_enabled = torch.is_grad_enabled


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
    if watched() or traced():
        return seen(MLA_PAGED_ATTENTION, args, None, backend, functools.partial(_dispatched, args, backend))
    return _dispatched(args, backend)


def _dispatched(args: tuple[Any, ...], backend: str | None) -> Any:
    """The kernel that is hot for this call, or the cold path."""
    _check_pages(args[2], args[4])
    world = current_world()
    try:
        key = _key(world, args, backend)
        bound = world.hot.get(key) if key is not None else None
    except (RuntimeError, TypeError):  # a nested tensor, an option that cannot be hashed
        key = bound = None
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run(*args)
        except Exception as error:
            return recover(MLA_PAGED_ATTENTION, world, key, bound, args, None, backend, error)
    return miss(MLA_PAGED_ATTENTION, world, key, args, None, backend)


def _check_pages(ckv_cache: Any, batch: Any) -> None:
    """Every context must fit its row of pages. Checked at each call: lengths grow without a new key."""
    if not isinstance(batch, PagedBatch):
        raise InvalidInputError(
            code="TYPE_INVALID", value=f"batch: {type(batch).__name__}", limit="a PagedBatch, made by lz.paged_batch"
        )
    if not isinstance(ckv_cache, Tensor) or ckv_cache.ndim != 3:
        return  # refused with its own words on the cold path
    rows, page = batch.block_tables.shape[1], ckv_cache.shape[1]
    if batch.max_context_len > rows * page:
        raise InvalidInputError(
            code="BLOCK_TABLE_INVALID",
            value=f"context of {batch.max_context_len}",
            limit=f"{rows} pages of {page}",
        )
    if batch.block_tables.is_cpu and modes.plain((batch.block_tables,)):
        batch.check_page_numbers(page, ckv_cache.shape[0])


def _key(world: Any, args: tuple[Any, ...], backend: str | None) -> Any:
    """Lengths enter as buckets, so a decode loop stays hot while its contexts grow."""
    from layerzero.selection.buckets import boundaries

    tensors, batch, scale, return_lse = args[:4], *args[4:]
    if scale is None or not all(isinstance(item, Tensor) for item in tensors):
        return None
    edges_q = boundaries(world, "mla_paged_attention", "seq_len_q")
    edges_k = boundaries(world, "mla_paged_attention", "seq_len_k")
    grad = _grad_enabled() and any(item.requires_grad for item in tensors)
    return (
        "mla_paged_attention",
        *(describe_tensor(item) for item in tensors),
        batch.hot_key(),
        batch.total_q,
        batch.max_query_len if edges_q is None else bisect_left(edges_q, batch.max_query_len),
        batch.max_context_len if edges_k is None else bisect_left(edges_k, batch.max_context_len),
        return_lse,
        backend,
        mode_key(grad),
    )


def _describe(call: Call) -> Context:
    q_nope, q_pe, ckv_cache, kpe_cache, batch, scale, return_lse = call.args
    named = (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache))
    for name, item in named:
        expect_rank(expect_tensor(item, name), name, (3,))
    check_devices(**dict(named), block_tables=batch.block_tables)
    words = {name: check_floating(item, name) for name, item in named}
    if scale is None:
        raise InvalidInputError(code="TYPE_INVALID", value="scale: NoneType", limit="a number")
    check_scale(scale)
    if words["kpe_cache"] != words["ckv_cache"]:
        raise InvalidInputError(
            "ckv_cache and kpe_cache disagree",
            code="KV_CACHE_DTYPE_MISMATCH",
            value=words["kpe_cache"],
            limit=words["ckv_cache"],
        )
    tokens, heads, latent = q_nope.shape
    blocks, page, width = ckv_cache.shape
    _same("q_nope and q_pe", q_pe.shape[:2], (tokens, heads), q_pe)
    _same("ckv_cache and kpe_cache", kpe_cache.shape[:2], (blocks, page), kpe_cache)
    for names, left, right in (
        ("q_nope and ckv_cache", latent, width),
        ("q_pe and kpe_cache", q_pe.shape[2], kpe_cache.shape[2]),
    ):
        if left != right:
            raise InvalidInputError(f"{names} disagree", code="HEAD_DIM_MISMATCH", value=left, limit=right)
    if 0 in (heads, latent, page):
        raise InvalidInputError(
            code="SHAPE_INVALID",
            value=f"{tuple(q_nope.shape)} over {tuple(ckv_cache.shape)}",
            limit="at least one head, one latent channel and one token a page",
        )
    if tokens != batch.total_q:
        raise InvalidInputError(
            "q_nope does not fit the batch",
            code="SHAPE_INVALID",
            value=f"{tokens} query tokens",
            limit=f"{batch.total_q} from query_lens",
        )
    _check_pages(ckv_cache, batch)
    needs = {
        "lse": return_lse,
        "lse_backward": return_lse and call.needs_grad,
        "backward": call.needs_grad,
        "paged_prefill": not batch.is_decode,
    }
    return Context(
        op="mla_paged_attention",
        device=call.device,
        dtype=words["q_nope"],
        dims=(
            ("batch", batch.batch_size),
            ("tokens", tokens),
            ("num_heads", heads),
            ("head_dim_ckv", latent),
            ("head_dim_kpe", q_pe.shape[2]),
            ("seq_len_q", batch.max_query_len),
            ("seq_len_k", batch.max_context_len),
            ("page_size", page),
            ("num_blocks", blocks),
        ),
        needs=frozenset(name for name, needed in needs.items() if needed),
        dtypes=(words["q_nope"], words["q_pe"]),
        rank=3,
        strides=stride_class((q_nope, q_pe, ckv_cache, kpe_cache)),
        causal=Causal.BOTTOM_RIGHT,
        needs_grad=call.needs_grad,
        backend=call.backend,
        kv_cache_dtype=words["ckv_cache"],
        index_dtype=dtype_name(batch.block_tables),
        scale=scale,
    )


def _same(names: str, found: Any, wanted: tuple[int, ...], tensor: Tensor) -> None:
    if tuple(found) != wanted:
        raise InvalidInputError(
            f"{names} disagree", code="SHAPE_INVALID", value=str(tuple(tensor.shape)), limit=f"{list(wanted)} in front"
        )


MLA_PAGED_ATTENTION = register(
    Op(
        function=mla_paged_attention,
        fake=lambda q_nope, *rest: with_lse(q_nope.new_empty(q_nope.shape), rest[-1]),
        describe=_describe,
        reference="layerzero.backends.reference.mla:mla_paged_attention",
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
        options=(
            "context",
            "lse",
        ),
        example="layerzero._ops.examples_attention:latent",
        tolerance="attention",
        growing=("seq_len_q", "seq_len_k"),
    )
)
