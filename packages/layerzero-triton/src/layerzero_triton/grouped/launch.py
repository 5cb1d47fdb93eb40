"""`grouped_attention` over the Triton kernels, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from layerzero.errors import invalid
from layerzero.model.attention import scaled
from layerzero.model.grouped import GroupedBatch
from layerzero_triton import cache
from layerzero_triton.grouped import backward as back
from layerzero_triton.grouped import forward as fore
from layerzero_triton.grouped.tables import backward_tables, forward_tables

_LOG2E = 1.4426950408889634
_HALVES = (torch.float16, torch.bfloat16)
_compiled: set[Hashable] = set()
_MOST = 4096  # keys; a program with more starts over, which costs a lock a call


class Config(NamedTuple):
    """Block sizes and compiler options of one kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    split: bool = True


# By head_dim.
FORWARD = {
    32: Config(128, 128, 8, 3),
    64: Config(128, 128, 8, 3),
    128: Config(128, 128, 8, 2),
    256: Config(128, 64, 8, 2),
}
# Rows of all groups and of the query heads of one KV head together.
SHARED = {
    32: Config(64, 64, 4, 3),
    64: Config(64, 64, 4, 3),
    128: Config(64, 64, 4, 3),
    256: Config(64, 64, 4, 2),
}
QUERIES = {32: Config(128, 64, 8, 2), 64: Config(128, 64, 8, 2), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 2)}
KEYS = {32: Config(64, 128, 8, 2), 64: Config(64, 128, 8, 2), 128: Config(64, 128, 8, 2), 256: Config(32, 64, 8, 2)}


Forward = Callable[..., tuple[Tensor, Tensor]]  # query, key, value, batch, causal, scale, fresh=…


def work_list(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, return_lse: bool
) -> Any:
    """One launch over tiles of single groups; for groups of many queries."""
    _check(query, key, value, batch, tuple(FORWARD))
    return _grouped("work_list", partial(forward, together=False), query, key, value, batch, causal, scale, return_lse)


def shared_tiles(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, return_lse: bool
) -> Any:
    """One launch in which each block of keys and values is loaded once for all groups; for groups of few queries."""
    _check(query, key, value, batch, tuple(SHARED))
    return _grouped(
        "shared_tiles", partial(forward, together=True), query, key, value, batch, causal, scale, return_lse
    )


def _grouped(
    name: str, run: Forward, query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool,
    scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    query, scale = scaled(query, scale)  # the running maximum is taken before scaling
    with _on(query), _into_our_cache(name, query.dtype, query.shape[1:], key.shape[1]) as fresh:
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out, lse = _Grouped.apply(run, query, key, value, batch, causal, scale, fresh)  # type: ignore[no-untyped-call]
        else:
            out, lse = run(query, key, value, batch, causal, scale, fresh=fresh)
    return (out, lse) if return_lse else out


def _check(query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, head_dims: Container[int]) -> None:
    """Raise for tensors that do not fit each other, the batch, or the kernels; looks at metadata only."""
    shape, other = query.shape, key.shape
    if len(shape) != 3 or len(other) != 3 or other != value.shape or shape[2] != other[2]:
        given = f"query {tuple(shape)}, key {tuple(other)}, value {tuple(value.shape)}"
        raise invalid("SHAPE_INVALID", given, "[total_q, Hq, D] and twice [total_k, Hkv, D]")
    if shape[2] not in head_dims:
        raise invalid("HEAD_DIM_INVALID", shape[2], str(head_dims))
    if other[1] == 0 or shape[1] % other[1]:
        raise invalid("GQA_RATIO_INVALID", shape[1], other[1])
    if shape[0] != batch.total_q or other[0] != batch.total_k:
        message = "the tensors do not fit the batch"
        expected = f"{batch.total_q} and {batch.total_k}"
        raise invalid("SHAPE_INVALID", f"{shape[0]} queries, {other[0]} keys", expected, message)
    if not query.dtype == key.dtype == value.dtype or (query.is_cuda and query.dtype not in _HALVES):
        expected = "float16 or bfloat16, all the same"
        raise invalid("DTYPE_UNSUPPORTED", ", ".join(str(item.dtype) for item in (query, key, value)), expected)
    if not query.device == key.device == value.device:
        raise invalid("DEVICE_MIXED", ", ".join(str(item.device) for item in (query, key, value)), "one device")


@contextlib.contextmanager
def _into_our_cache(*key: Hashable) -> Iterator[bool]:
    """The first call with a key compiles into our own folder; later ones find the kernel in memory.

    Gives whether it is the first: it then compiles what only later calls may need, so that no request does.
    """
    if key in _compiled:
        yield False
        return
    with cache.scoped():
        yield True
    if len(_compiled) >= _MOST:
        _compiled.clear()
    _compiled.add(key)


def _on(tensor: Tensor) -> Any:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


class _Grouped(torch.autograd.Function):
    """Forward and backward. The log-sum-exp that is returned carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any, run: Forward, query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool,
        scale: float, fresh: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = run(query, key, value, batch, causal, scale, fresh=fresh)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.batch, ctx.causal, ctx.scale = batch, causal, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        with _on(query), _into_our_cache("gradients", query.dtype, query.shape[1:], key.shape[1]):
            found = gradients(grad, query, key, value, out, lse, ctx.batch, ctx.causal, ctx.scale)
        return None, *found, None, None, None, None


def _descriptor(tokens: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """[tokens, H, D] as [tokens, H * D] for the copy engine; a copy where the strides do not suit it."""
    count, heads, width = tokens.shape
    by_token, by_head, by_dim = tokens.stride()
    fits = by_dim == 1 and (by_head == width or heads == 1) and by_token >= heads * width
    if not fits or by_token * tokens.element_size() % 16 or tokens.data_ptr() % 16:
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        by_token = heads * width
    found = torch.as_strided(tokens, (count, heads * width), (by_token, 1))
    return TensorDescriptor(found, list(found.shape), [by_token, 1], [rows, dim])


def forward(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float, together: bool,
    config: Config | None = None, fresh: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp, [total_q, Hq, D] and [total_q, Hq]; `scale` above zero. `fresh`: compile everything."""
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    if tokens == 0 or key.shape[0] == 0:
        return query.new_zeros(query.shape), query.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    cfg = config or (SHARED[dim] if together else FORWARD[dim])
    tables = forward_tables(
        batch, causal, heads, kv_heads, query.device, block_m=cfg.block_m, block_n=cfg.block_n, together=together,
        split=cfg.split,
    )  # fmt: skip
    plan = tables.plan
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
    parts = torch.empty((max(1, plan.slots), cfg.block_m, dim), dtype=torch.float32, device=query.device)
    parts_lse = torch.empty((max(1, plan.slots), cfg.block_m), dtype=torch.float32, device=query.device)
    shape = dict(PACKED=plan.packed, RATIO=heads // kv_heads, TOKENS=plan.tokens_per_tile, BLOCK_M=cfg.block_m, DIM=dim)
    if query.stride(2) != 1:
        query = query.contiguous()
    fore.attend[(len(plan.items),)](
        query, _descriptor(key, cfg.block_n, dim), _descriptor(value, cfg.block_n, dim), out, lse, parts, parts_lse,
        tables.items, tables.tokens, tables.limits, scale * _LOG2E, query.stride(0), query.stride(1), out.stride(0),
        out.stride(1), heads, **shape, BLOCK_N=cfg.block_n, num_warps=cfg.warps,
        num_stages=cfg.stages,
    )  # fmt: skip
    if plan.merges or fresh:  # an empty grid compiles and does not run
        chunk = min(16, cfg.block_m)
        fore.merge[(len(plan.merges), cfg.block_m // chunk)](
            out, lse, parts, parts_lse, tables.merges, tables.tokens, out.stride(0), out.stride(1), heads, **shape,
            CHUNK=chunk, num_warps=4,
        )  # fmt: skip
    return out, lse


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, batch: GroupedBatch,
    causal: bool, scale: float, queries: Config | None = None, keys: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; those of key and value are summed over groups and heads in float32."""
    tokens, heads, dim = query.shape
    total_k, kv_heads = key.shape[:2]
    if tokens == 0 or total_k == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for_q, for_k = queries or QUERIES[dim], keys or KEYS[dim]
    device = query.device
    query, grad = (item if item.stride(2) == 1 else item.contiguous() for item in (query, grad))
    deltas = torch.empty_like(lse)
    rows = 32
    back.delta[(-(-tokens // rows), heads)](
        out, grad, deltas, tokens, out.stride(0), out.stride(1), grad.stride(0), grad.stride(1), heads, BLOCK=rows,
        DIM=dim, num_warps=4,
    )  # fmt: skip
    tables = forward_tables(
        batch, causal, heads, kv_heads, device, block_m=for_q.block_m, block_n=for_q.block_n, together=False,
        split=False,
    )  # fmt: skip
    ratio = heads // kv_heads
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=device)
    back.grad_queries[(len(tables.plan.items),)](
        query, _descriptor(key, for_q.block_n, dim), _descriptor(value, for_q.block_n, dim), grad, lse, deltas,
        grad_query, tables.items, tables.tokens, tables.limits, scale * _LOG2E, scale, query.stride(0), query.stride(1),
        grad.stride(0), grad.stride(1), grad_query.stride(0), grad_query.stride(1), heads, RATIO=ratio,
        TOKENS=tables.plan.tokens_per_tile, BLOCK_M=for_q.block_m, BLOCK_N=for_q.block_n, DIM=dim,
        num_warps=for_q.warps, num_stages=for_q.stages,
    )  # fmt: skip
    found = backward_tables(batch, causal, device, block_n=for_k.block_n)
    grad_key = torch.empty(key.shape, dtype=key.dtype, device=device)
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=device)
    back.grad_keys[(found.blocks.shape[0] * kv_heads,)](
        _descriptor(query, for_k.block_m, dim), _descriptor(key, for_k.block_n, dim),
        _descriptor(value, for_k.block_n, dim), _descriptor(grad, for_k.block_m, dim), lse, deltas, grad_key,
        grad_value, found.blocks, found.segments, scale * _LOG2E, scale, grad_key.stride(0), grad_key.stride(1),
        grad_value.stride(0), grad_value.stride(1), heads, found.groups, kv_heads, RATIO=ratio, BLOCK_M=for_k.block_m,
        BLOCK_N=for_k.block_n, DIM=dim, num_warps=for_k.warps, num_stages=for_k.stages,
    )  # fmt: skip
    return grad_query, grad_key, grad_value
