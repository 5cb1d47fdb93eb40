"""`lz.mla_paged_attention` on FlashInfer's latent-attention wrapper, planned once per batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero_flashinfer.options import bury, no_keys, unwritten
from layerzero_flashinfer.paged import buffers_of, lengths_of
from layerzero_flashinfer.plans import (
    Slot,
    capturing,
    expect_launch,
    give,
    launch_of,
    mark,
    refuse_planning,
    starts_of,
    take,
)
from layerzero_flashinfer.vendor import lib
from layerzero_flashinfer.workspace import Workspace, place, workspace

__all__ = ["mla_fa2", "mla_fa3"]


class LatentPlan:
    """One planned wrapper of one batch."""

    __slots__ = ("_dead", "_key", "_problem", "_slot", "fixed", "scratch")

    def __init__(self, problem: tuple[Any, ...], where: tuple[int, int], batch: PagedBatch) -> None:
        device = batch.block_tables.device
        self._problem = problem
        self.fixed = batch.capture
        self.scratch = Workspace(device) if self.fixed else workspace(where, device)
        self._key = (where, "mla", problem[0])
        self._slot = None if self.fixed else take(self._key)
        if self._slot is None:
            starts_q, starts, pages, lens = buffers_of(batch) if self.fixed else (None,) * 4
            self._slot = Slot(
                lib().mla.BatchMLAPagedAttentionWrapper(
                    self.scratch.batch, use_cuda_graph=self.fixed, qo_indptr=starts_q, kv_indptr=starts,
                    kv_indices=pages, kv_len_arr=lens, backend=problem[0],
                )
            )  # fmt: skip
        self._dead: tuple[tuple[int, int], ...] = ()
        self._make(batch)

    def __del__(self) -> None:
        slot = getattr(self, "_slot", None)
        if slot is not None and not self.fixed:
            give(self._key, slot)

    def replan(self, batch: PagedBatch) -> None:
        """The numbers of the batch have changed: plan into the same buffers."""
        refuse_planning("batch.update")
        self._make(batch)

    def _make(self, batch: PagedBatch) -> None:
        _, heads, latent, rotated, page, dtype, kv_dtype, causal, scale = self._problem
        lengths = lengths_of(batch, page)
        slot = self._slot
        assert slot is not None
        before = launch_of(slot.wrapper) if self.fixed else None
        with self.scratch.lock:
            if slot.copied is not None:
                slot.copied.synchronize()
            slot.wrapper.plan(
                starts_of(lengths.queries), lengths.starts, lengths.pages,
                torch.tensor(lengths.contexts, dtype=torch.int32), heads, latent, rotated, page, causal, scale, dtype,
                kv_dtype,
            )  # fmt: skip
            slot.copied = mark(self.scratch.device)
        expect_launch(slot.wrapper, before)
        self._dead = no_keys(causal, lengths.queries, lengths.contexts)

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, return_lse: bool) -> Any:
        """(out, natural log-sum-exp) when asked, else the result alone."""
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device) if return_lse else None
        with self.scratch.lock:
            self._slot.wrapper.run(  # type: ignore[union-attr]
                q_nope, q_pe, ckv, kpe, out=out, lse=lse, return_lse=return_lse, return_lse_base_on_e=True
            )  # fmt: skip
        if self._dead and not self.fixed:
            bury(out, lse, self._dead)
        if lse is None:
            return out
        return out, unwritten(lse) if self.fixed else lse


def _attend(
    backend: str,
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Any:
    # Scores are scaled after the mask: a scale that is not positive turns the queries instead.
    if scale <= 0.0:
        sign = -1.0 if scale < 0.0 else 0.0
        q_nope, q_pe, scale = q_nope * sign, q_pe * sign, -scale or 1.0
    problem = (
        backend, q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], ckv_cache.shape[1], q_nope.dtype, ckv_cache.dtype,
        not batch.is_decode, float(scale),
    )  # fmt: skip
    where = place(q_nope)
    key = problem if batch.capture else (problem, where)
    found = batch.plans.get(key)
    if found is None:
        refuse_planning("this batch has no plan yet")
        found = batch.plans[key] = LatentPlan(problem, where, batch)
    elif not batch.capture and capturing():
        refuse_planning("this batch may be planned again behind the graph's back")
    assert isinstance(found, LatentPlan)
    return found.run(q_nope, q_pe, ckv_cache, kpe_cache, return_lse)


def mla_fa2(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Any:
    """Latent attention on the FA2 template."""
    return _attend("fa2", q_nope, q_pe, ckv_cache, kpe_cache, batch, scale, return_lse)


def mla_fa3(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Any:
    """Latent attention on Hopper's FA3 template."""
    return _attend("fa3", q_nope, q_pe, ckv_cache, kpe_cache, batch, scale, return_lse)
