"""`lz.mla_paged_attention` on FlashInfer's latent-attention wrapper, planned once per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import offsets
from layerzero.model.kv_cache import PagedBatch
from layerzero_flashinfer.options import options
from layerzero_flashinfer.plans import Buffer, Lengths, Plan, Problem, capturing, plan_batch, refuse_planning
from layerzero_flashinfer.vendor import lib
from layerzero_flashinfer.workspace import place


class LatentPlan(Plan):
    """One planned wrapper of one batch."""

    __slots__ = ()
    room, grows = None, False

    def _wrapper(self, starts_q: Buffer, starts: Buffer, pages: Buffer, last: Buffer) -> Any:
        return lib().mla.BatchMLAPagedAttentionWrapper(
            self.scratch.batch, use_cuda_graph=self.fixed, qo_indptr=starts_q, kv_indptr=starts, kv_indices=pages,
            kv_len_arr=last, backend=self.problem.kind.partition("_")[2],
        )  # fmt: skip

    def _plan(self, wrapper: Any, lengths: Lengths) -> None:
        problem = self.problem
        wrapper.plan(
            *offsets(lengths.queries), lengths.starts, lengths.pages,
            torch.tensor(lengths.contexts, dtype=torch.int32), problem.heads, problem.head_dim, problem.rope_dim,
            problem.page_size, problem.options.causal, problem.options.scale, problem.dtype, problem.kv_dtype,
        )  # fmt: skip

    def run_latent(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, return_lse: bool) -> Any:
        """(out, natural log-sum-exp) when asked, else the result alone."""
        turned = self.problem.options.turned
        if turned != 1.0:
            q_nope, q_pe = q_nope * turned, q_pe * turned
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device) if return_lse else None
        with self.scratch.lock:
            self._slot.wrapper.run(
                q_nope, q_pe, ckv, kpe, out=out, lse=lse, return_lse=return_lse, return_lse_base_on_e=True
            )  # fmt: skip
        return self._finished(out, lse)


def _kernel(kind: str) -> Callable[..., Any]:
    """The kernel on one template."""

    def attend(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        return_lse: bool,
    ) -> Any:
        # A graph is captured on a stream of its own: its plans belong to the batch, whatever the stream.
        where = place(q_nope)
        stream = None if batch.capture else where
        key = (kind, q_nope.shape, q_pe.shape, ckv_cache.shape, q_nope.dtype, ckv_cache.dtype, scale, stream)
        found = batch.plans.get(key)
        if found is None:
            sizes = (q_nope.shape[1], 1, q_nope.shape[2], ckv_cache.shape[1])
            asked = options(not batch.is_decode, None, None, scale, 0)
            problem = Problem(kind, *sizes, q_nope.dtype, ckv_cache.dtype, "NHD", asked, q_pe.shape[2])
            found = batch.plans[key] = plan_batch(problem, where, batch, LatentPlan)
        elif stream is not None and capturing():
            refuse_planning("this batch may be planned again behind the graph's back")
        assert isinstance(found, LatentPlan)
        return found.run_latent(q_nope, q_pe, ckv_cache, kpe_cache, return_lse)

    return attend


mla_fa2 = _kernel("mla_fa2")
mla_fa3 = _kernel("mla_fa3")  # Hopper's template
