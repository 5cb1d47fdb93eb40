"""`lz.paged_attention` on FlashInfer's wrappers: a batch is planned at its first call and kept in the batch.

Every layer of a model asks the same of a batch, so one plan serves them all. With a batch made for a capture the plan
lies in fixed buffers, and `batch.update` plans into them again; any other batch is refused inside a capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero_flashinfer.options import options
from layerzero_flashinfer.plans import Lengths, Plan, Problem, capturing, plan, refuse_planning
from layerzero_flashinfer.workspace import place

__all__ = ["buffers_of", "decode", "decode_tc", "lengths_of", "prefill_fa2", "prefill_fa3"]


class BatchPlan:
    """A plan together with how its lengths are read from a batch, and how the query is turned first."""

    __slots__ = ("page_size", "plan", "turned")

    def __init__(self, problem: Problem, turned: float, where: tuple[int, int], batch: PagedBatch) -> None:
        self.page_size = problem.page_size
        self.turned = turned
        buffers = buffers_of(batch) if batch.capture else None
        self.plan: Plan = plan(problem, where, batch.block_tables.device, lengths_of(batch, self.page_size), buffers)

    def replan(self, batch: PagedBatch) -> None:
        """The numbers of the batch have changed: plan into the same buffers."""
        refuse_planning("batch.update")
        self.plan.make(lengths_of(batch, self.page_size))


def lengths_of(batch: PagedBatch, page_size: int) -> Lengths:
    """A batch as a plan takes it. Only the page numbers are read on the device."""
    starts, places, last = batch.page_places(page_size)
    tables = batch.block_tables
    pages = tables.reshape(-1).index_select(0, places).to(torch.int32)
    return Lengths(batch.query_lens_host, batch.context_lens_host, starts, pages, last)


def buffers_of(batch: PagedBatch) -> tuple[Tensor, ...]:
    """Fixed room for a graph: query starts, page starts, as many pages as the tables can name, last page lengths."""
    count, room = batch.batch_size, max(1, batch.block_tables.numel())
    device = batch.block_tables.device
    return tuple(torch.zeros(n, dtype=torch.int32, device=device) for n in (count + 1, count + 1, room, count))


def _planned(
    kind: str,
    query: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    layout: str,
) -> BatchPlan:
    """A new plan of this batch, for calls like this one."""
    refuse_planning("this batch has no plan yet")
    asked = options(kind[0] == "p", window, softcap, scale, query.shape[-1])
    # One query sees its whole context: nothing is masked, and the keys may be split.
    causal = kind[0] == "p"
    page, kv_heads = (cache.shape[1], cache.shape[2]) if layout == "NHD" else (cache.shape[2], cache.shape[1])
    problem = Problem(
        kind, query.shape[1], kv_heads, query.shape[2], page, query.dtype, cache.dtype, layout, causal, asked.window,
        asked.softcap, asked.scale,
    )  # fmt: skip
    return BatchPlan(problem, asked.turned, place(query), batch)


def _attend(
    kind: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    return_lse: bool,
    layout: str,
) -> Any:
    # A graph is captured on a stream of its own: its plans belong to the batch, whatever the stream.
    where = None if batch.capture else place(query)
    key = (kind, query.shape, query.dtype, key_cache.shape, key_cache.dtype, layout, scale, window, softcap, where)
    found = batch.plans.get(key)
    if found is None:
        found = batch.plans[key] = _planned(kind, query, key_cache, batch, scale, window, softcap, layout)
    elif where is not None and capturing():
        refuse_planning("this batch may be planned again behind the graph's back")
    assert isinstance(found, BatchPlan)
    if found.turned != 1.0:
        query = query * found.turned
    if key_cache.stride() != value_cache.stride():  # the kernels read both with one set of strides
        key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()
    return found.plan.run(query, key_cache, value_cache, return_lse)


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """One query a sequence, on CUDA cores."""
    return _attend("decode", query, key_cache, value_cache, batch, scale, window, softcap, return_lse, layout)


def decode_tc(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """One query a sequence, on tensor cores: the heads of a GQA group share one read of the cache."""
    return _attend("decode_tc", query, key_cache, value_cache, batch, scale, window, softcap, return_lse, layout)


def prefill_fa2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """Any number of queries a sequence, on the FA2 template."""
    return _attend("paged_fa2", query, key_cache, value_cache, batch, scale, window, softcap, return_lse, layout)


def prefill_fa3(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """Any number of queries a sequence, on Hopper's FA3 template."""
    return _attend("paged_fa3", query, key_cache, value_cache, batch, scale, window, softcap, return_lse, layout)
