"""Plans of FlashInfer's batch wrappers: made once per batch, run many times, recycled when the batch is gone.

A wrapper owns some 8 MiB on the device and 8 MiB of pinned memory, so they are pooled by place and kind. Planning works
on lengths the host already has: nothing waits for the device. A plan for a captured graph has buffers and scratch
memory of its own, since a replay comes at any time and on any stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import CudaGraphUnsafeError
from layerzero_flashinfer.launches import Launch, decode_launch
from layerzero_flashinfer.options import LN2, bury, no_keys, unwritten
from layerzero_flashinfer.vendor import lib
from layerzero_flashinfer.workspace import GRAPH, Workspace, workspace

__all__ = [
    "Lengths",
    "Plan",
    "Problem",
    "capturing",
    "expect_launch",
    "launch_of",
    "mark",
    "plan",
    "refuse_planning",
    "starts_of",
]

Place = tuple[int, int]  # device index, raw stream

if torch.version.cuda is not None:
    capturing = torch.cuda.is_current_stream_capturing
else:  # torch without CUDA

    def capturing() -> bool:
        """Nothing is ever captured."""
        return False


class Problem(NamedTuple):
    """Everything a plan depends on but the lengths; also its key."""

    kind: str  # decode, decode_tc, paged_fa2, paged_fa3, ragged_fa2, ragged_fa3
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str
    causal: bool
    window: int
    softcap: float
    scale: float


class Lengths(NamedTuple):
    """A batch on the host: lengths, where each sequence's pages begin, and (on the device) the page numbers."""

    queries: Sequence[int]
    contexts: Sequence[int]
    starts: Tensor  # int32 [B + 1]: of pages, or of packed keys
    pages: Tensor | None
    last: Tensor | None  # int32 [B]


class Slot:
    """A wrapper and the moment its last plan had left the pinned memory."""

    __slots__ = ("copied", "wrapper")

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.copied: torch.cuda.Event | None = None


_SPARE = 4  # wrappers kept for a place and kind beyond those in use

Key = tuple[Place, str, str]
_free: dict[Key, list[Slot]] = {}
_pool = threading.Lock()


class Plan:
    """One planned wrapper. `run` may be called by several threads; a fixed one belongs to a captured graph."""

    __slots__ = ("_dead", "_key", "_launch", "_slot", "fixed", "problem", "scratch")

    def __init__(
        self, problem: Problem, where: Place, device: torch.device, buffers: tuple[Tensor, ...] | None
    ) -> None:
        self.problem = problem
        self.fixed = buffers is not None
        self._key = (where, problem.kind, problem.layout)
        self._dead: tuple[tuple[int, int], ...] = ()
        self._launch: Launch | None = None
        self.scratch = Workspace(device, GRAPH) if self.fixed else workspace(where, device)
        self._slot = None if self.fixed else take(self._key)
        if self._slot is None:
            self._slot = Slot(_wrapper(problem, self.scratch, buffers))

    def __del__(self) -> None:
        slot = getattr(self, "_slot", None)
        if slot is not None and not self.fixed:
            give(self._key, slot)

    def make(self, lengths: Lengths) -> None:
        """Plan for these lengths, after any earlier plan of the wrapper has been read."""
        slot, problem = self._slot, self.problem
        assert slot is not None
        before = launch_of(slot.wrapper) if self.fixed else None
        with self.scratch.lock:
            if slot.copied is not None:
                slot.copied.synchronize()
            self._plan(slot.wrapper, lengths, may_grow=before is None)
            slot.copied = mark(self.scratch.device)
        expect_launch(slot.wrapper, before)
        self._dead = no_keys(problem.causal, lengths.queries, lengths.contexts)
        if problem.kind[0] == "d":
            self._launch = decode_launch(slot.wrapper, problem.layout, problem.window, problem.softcap, problem.scale)

    def _plan(self, wrapper: Any, lengths: Lengths, *, may_grow: bool) -> None:
        """With more scratch memory, where the plan says that what there is does not suffice; never behind a graph."""
        planner = _PLANNERS[self.problem.kind.partition("_")[0]]
        while True:
            try:
                return planner(wrapper, self.problem, lengths)
            except RuntimeError as error:
                if "AlignedAllocator" not in str(error) or not may_grow or not self.scratch.grow():
                    raise
                wrapper.reset_workspace_buffer(self.scratch.batch, wrapper._int_workspace_buffer)

    def run(self, query: Tensor, key: Tensor, value: Tensor, return_lse: bool) -> Any:
        """Packed queries [T, H, D] over pages, or over packed keys; (out, natural log-sum-exp [T, H]) when asked."""
        launch = self._launch
        if launch is not None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device) if return_lse else None
            with self.scratch.lock:
                launch(query, key, value, out, lse)
            if lse is None and not self._dead:
                return out
        else:
            problem, wrapper = self.problem, self._slot.wrapper  # type: ignore[union-attr]
            cache = (key, value) if problem.kind[0] == "r" else ((key, value),)
            if problem.kind[0] == "d" and not return_lse and not self._dead:
                # Decode makes its result itself: what is handed in it looks over first, for some µs of the host. The
                # other wrappers fill theirs with zeros, which costs the device a pass over it.
                with self.scratch.lock:
                    return wrapper.run(query, *cache)
            out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
            lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device) if return_lse else None
            with self.scratch.lock:
                wrapper.run(query, *cache, out=out, lse=lse, return_lse=return_lse)
        if self._dead and not self.fixed:
            bury(out, lse, self._dead)
        if lse is None:
            return out
        lse.mul_(LN2)
        return out, unwritten(lse) if self.fixed else lse


def plan(
    problem: Problem, where: Place, device: torch.device, lengths: Lengths, buffers: tuple[Tensor, ...] | None = None
) -> Plan:
    """A plan for these lengths; with `buffers` (see `_wrapper`) one for a captured graph."""
    made = Plan(problem, where, device, buffers)
    made.make(lengths)
    return made


def launch_of(wrapper: Any) -> list[int] | None:
    """The part of a plan that a captured launch holds by value: grid, template and offsets; None before the first."""
    found = getattr(wrapper, "_plan_info", None)
    return None if found is None else [int(number) for number in found]


def expect_launch(wrapper: Any, before: list[int] | None) -> None:
    """A graph launches what it was captured with: a plan that would launch anything else must not be replayed."""
    if before is not None and launch_of(wrapper) != before:
        raise CudaGraphUnsafeError(
            code="GRAPH_CAPTURE_FAILED", value="these lengths need another launch than the captured one; capture again"
        )


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The present moment of the current stream."""
    if device.type != "cuda":
        return None
    found = torch.cuda.Event()  # type: ignore[no-untyped-call]
    found.record(torch.cuda.current_stream(device))
    return found


def refuse_planning(what: str) -> None:
    """Planning copies from the host, which a graph would repeat from memory that has long changed."""
    if capturing():
        raise CudaGraphUnsafeError(code="BATCH_NOT_PLANNED", value=what)


def take(key: Key) -> Slot | None:
    """A wrapper that nobody uses any more, for the same place and kind."""
    with _pool:
        free = _free.get(key)
        return free.pop() if free else None


def give(key: Key, slot: Slot) -> None:
    """Keep a wrapper for the next batch; called when a plan is garbage."""
    free = _free.setdefault(key, [])
    if len(free) < _SPARE:
        free.append(slot)  # atomic; a lock here could wait for itself


def _wrapper(problem: Problem, scratch: Workspace, buffers: tuple[Tensor, ...] | None) -> Any:
    """The wrapper of a kind. `buffers` of a fixed one: query starts, page starts, pages, last page lengths."""
    kind, _, backend = problem.kind.partition("_")
    graph = buffers is not None
    starts_q, starts, pages, last = buffers if buffers is not None else (None,) * 4
    if kind == "decode":
        return lib().BatchDecodeWithPagedKVCacheWrapper(
            scratch.batch, problem.layout, use_cuda_graph=graph, use_tensor_cores=backend == "tc",
            paged_kv_indptr_buffer=starts, paged_kv_indices_buffer=pages, paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )  # fmt: skip
    if kind == "paged":
        return lib().BatchPrefillWithPagedKVCacheWrapper(
            scratch.batch, problem.layout, use_cuda_graph=graph, qo_indptr_buf=starts_q, paged_kv_indptr_buf=starts,
            paged_kv_indices_buf=pages, paged_kv_last_page_len_buf=last, backend=backend,
        )  # fmt: skip
    return lib().BatchPrefillWithRaggedKVCacheWrapper(scratch.batch, problem.layout, backend=backend)


def starts_of(lengths: Sequence[int]) -> Tensor:
    """Offsets of packed sequences, int32 [B + 1], on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _plan_decode(wrapper: Any, problem: Problem, lengths: Lengths) -> None:
    wrapper.plan(
        lengths.starts, lengths.pages, lengths.last, problem.heads, problem.kv_heads, problem.head_dim,
        problem.page_size, pos_encoding_mode="NONE", window_left=problem.window, logits_soft_cap=problem.softcap,
        q_data_type=problem.dtype, kv_data_type=problem.kv_dtype, sm_scale=problem.scale, non_blocking=True,
    )  # fmt: skip


def _plan_paged(wrapper: Any, problem: Problem, lengths: Lengths) -> None:
    wrapper.plan(
        starts_of(lengths.queries), lengths.starts, lengths.pages, lengths.last, problem.heads, problem.kv_heads,
        problem.head_dim, problem.page_size, causal=problem.causal, pos_encoding_mode="NONE", sm_scale=problem.scale,
        window_left=problem.window, logits_soft_cap=problem.softcap, q_data_type=problem.dtype,
        kv_data_type=problem.kv_dtype, non_blocking=True,
    )  # fmt: skip


def _plan_ragged(wrapper: Any, problem: Problem, lengths: Lengths) -> None:
    wrapper.plan(
        starts_of(lengths.queries), lengths.starts, problem.heads, problem.kv_heads, problem.head_dim,
        causal=problem.causal, pos_encoding_mode="NONE", window_left=problem.window, logits_soft_cap=problem.softcap,
        sm_scale=problem.scale, q_data_type=problem.dtype, kv_data_type=problem.kv_dtype, non_blocking=True,
    )  # fmt: skip


_PLANNERS = {"decode": _plan_decode, "paged": _plan_paged, "ragged": _plan_ragged}
