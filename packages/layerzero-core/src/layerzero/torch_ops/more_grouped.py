"""Grouped attention and latent attention inside torch's machinery.

A `GroupedBatch` or `PagedBatch` may come into a compiled region from outside. `lz.grouped_batch` itself breaks a graph;
`lz.grouped_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, kv_lens)` does so only where a gradient is needed: without
one it plans when the graph runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.model.grouped import GroupedBatch, make_grouped_batch
from layerzero.model.kv_cache import PagedBatch
from layerzero.torch_ops.calls import batch_of
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.opaque import OpaqueOp, differentiable, place

__all__ = ["BRIDGES", "OPS", "TWINS"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_grouped = importlib.import_module("layerzero.backends.reference.grouped")
_mla = importlib.import_module("layerzero.backends.reference.mla")


# -- grouped attention -----------------------------------------------------------------------------
_GROUPED = (
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor kv_lens, "
    "SymInt[]? cu_seqlens_q_host, SymInt[]? cu_seqlens_k_host, SymInt[]? kv_lens_host, bool causal, Scalar? scale, "
    "str? backend=None)"
)


def _grouped_batch(
    offsets_q: Tensor,
    offsets_k: Tensor,
    kv_lens: Tensor,
    q_host: Sequence[int] | None,
    k_host: Sequence[int] | None,
    lens_host: Sequence[int] | None,
) -> GroupedBatch:
    """The batch those parts describe; without host numbers it is planned here, which waits for the device."""
    if q_host is None or k_host is None or lens_host is None:
        return make_grouped_batch(offsets_q, offsets_k, kv_lens)
    return GroupedBatch(offsets_q, offsets_k, kv_lens, tuple(q_host), tuple(k_host), tuple(lens_host))


def _run_grouped(query: Tensor, key: Tensor, value: Tensor, *rest: Any, return_lse: bool) -> Any:
    *parts, causal, scale, backend = rest
    return functions["grouped_attention"](
        query, key, value, _grouped_batch(*parts), causal=causal, scale=scale, return_lse=return_lse, backend=backend
    )


def _call_grouped(*args: Any) -> Tensor:
    out: Tensor = _run_grouped(*args, return_lse=False)
    return out.contiguous()


def _call_grouped_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run_grouped(*args, return_lse=True)
    return out.contiguous(), lse.contiguous()


def _fake_grouped(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def _fake_grouped_lse(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_grouped(query, key, value), query.new_empty(query.shape[:2], dtype=torch.float32)


def _plain_grouped(query: Tensor, key: Tensor, value: Tensor, *rest: Any, return_lse: bool = False) -> Any:
    *parts, causal, scale, _ = rest
    return _grouped.grouped_attention(query, key, value, _grouped_batch(*parts), causal, scale, return_lse)


def _plain_grouped_lse(*args: Any) -> Any:
    return _plain_grouped(*args, return_lse=True)


def _grouped_parts(batch: GroupedBatch) -> tuple[Any, ...]:
    return (
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        batch.kv_lens,
        list(batch.cu_seqlens_q_host),
        list(batch.cu_seqlens_k_host),
        list(batch.kv_lens_host),
    )


def _bridge_grouped(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    query, key, value, batch, causal, scale, return_lse = args
    op = ops.grouped_attention_lse if return_lse else ops.grouped_attention
    return op.default(query, key, value, *_grouped_parts(batch), causal, scale, backend)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: GroupedBatch | Tensor,
    cu_seqlens_k: Tensor | None = None,
    kv_lens: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Twin of `lz.grouped_attention`."""
    if isinstance(batch, GroupedBatch):
        parts = _grouped_parts(batch)
    else:
        parts = (batch, cu_seqlens_k, kv_lens, None, None, None)
    args = (query, key, value, *parts, causal, scale, backend)
    if differentiable(backend, query, key, value):
        if parts[3] is None:
            torch._dynamo.graph_break(msg="a gradient needs the lengths; make a lz.grouped_batch outside of the graph")
        return _plain_grouped(*args, return_lse=return_lse)
    ops = torch.ops.layerzero
    return place(ops.grouped_attention_lse if return_lse else ops.grouped_attention, *args)


# -- latent attention ------------------------------------------------------------------------------
_MLA = (
    "(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor block_tables, Tensor context_lens, "
    "Tensor? query_lens, SymInt[]? context_lens_host, SymInt[]? query_lens_host, Scalar scale, str? backend=None)"
)


def _run_mla(q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *rest: Any, return_lse: bool) -> Any:
    *parts, scale, backend = rest
    return functions["mla_paged_attention"](
        q_nope, q_pe, ckv_cache, kpe_cache, batch_of(*parts), scale=scale, return_lse=return_lse, backend=backend
    )


def _call_mla(*args: Any) -> Tensor:
    out: Tensor = _run_mla(*args, return_lse=False)
    return out.contiguous()


def _call_mla_lse(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = _run_mla(*args, return_lse=True)
    return out.contiguous(), lse.contiguous()


def _fake_mla(q_nope: Tensor, *rest: Any) -> Tensor:
    return q_nope.new_empty(q_nope.shape)


def _fake_mla_lse(q_nope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_mla(q_nope), q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)


def _plain_mla(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *rest: Any, return_lse: bool = False
) -> Any:
    *parts, scale, _ = rest
    return _mla.mla_paged_attention(q_nope, q_pe, ckv_cache, kpe_cache, batch_of(*parts), scale, return_lse)


def _plain_mla_lse(*args: Any) -> Any:
    return _plain_mla(*args, return_lse=True)


def _paged_parts(batch: PagedBatch) -> tuple[Any, ...]:
    return (
        batch.block_tables,
        batch.context_lens,
        batch.query_lens,
        list(batch.context_lens_host),
        list(batch.query_lens_host),
    )


def _bridge_mla(ops: Any, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    *tensors, batch, scale, return_lse = args
    op = ops.mla_paged_attention_lse if return_lse else ops.mla_paged_attention
    return op.default(*tensors, *_paged_parts(batch), scale, backend)


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
    """Twin of `lz.mla_paged_attention`."""
    args = (q_nope, q_pe, ckv_cache, kpe_cache, *_paged_parts(batch), scale, backend)
    if differentiable(backend, q_nope, q_pe, ckv_cache, kpe_cache):
        return _plain_mla(*args, return_lse=return_lse)
    ops = torch.ops.layerzero
    return place(ops.mla_paged_attention_lse if return_lse else ops.mla_paged_attention, *args)


# The fused kernels give no gradient through the log-sum-exp, so there the backward takes the plain form.
OPS: tuple[OpaqueOp, ...] = (
    OpaqueOp("grouped_attention", f"{_GROUPED} -> Tensor", _call_grouped, _fake_grouped, _plain_grouped, autocast=True),
    OpaqueOp(
        "grouped_attention_lse",
        f"{_GROUPED} -> (Tensor, Tensor)",
        _call_grouped_lse,
        _fake_grouped_lse,
        _plain_grouped_lse,
        autocast=True,
        replay=False,
    ),
    OpaqueOp("mla_paged_attention", f"{_MLA} -> Tensor", _call_mla, _fake_mla, _plain_mla),
    OpaqueOp(
        "mla_paged_attention_lse",
        f"{_MLA} -> (Tensor, Tensor)",
        _call_mla_lse,
        _fake_mla_lse,
        _plain_mla_lse,
        replay=False,
    ),
)
TWINS: dict[str, Callable[..., Any]] = {twin.__name__: twin for twin in (grouped_attention, mla_paged_attention)}
BRIDGES: dict[str, Callable[..., Any]] = {
    "grouped_attention": _bridge_grouped,
    "mla_paged_attention": _bridge_mla,
}
