"""Plans of FlashInfer's batch wrappers: made once per batch, run many times, recycled when the batch is gone.

A wrapper owns some 8 MiB on the device and 8 MiB of pinned memory, so they are pooled by place and kind. Planning works
on lengths the host already has: nothing waits for the device. A plan for a captured graph has buffers and scratch
memory of its own, since a replay comes at any time and on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import CudaGraphUnsafeError
from layerzero.model.attention import offsets
from layerzero.model.kv_cache import PagedBatch
from layerzero_flashinfer.options import LN2, Options, bury, no_keys, unwritten
from layerzero_flashinfer.vendor import lib, starts_with
from layerzero_flashinfer.workspace import GRAPH, Workspace, workspace

Place = tuple[int, int]  # device index, raw stream
Buffer = Tensor | None  # where a graph keeps a part of its plan
Launch = Callable[..., Any]
"""(query, keys, values, out, log-sum-exp or None), all but the last on the device of the plan."""

if torch.version.cuda is not None:
    capturing = torch.cuda.is_current_stream_capturing
else:  # torch without CUDA

    def capturing() -> bool:
        """Nothing is ever captured."""
        return False


class Problem(NamedTuple):
    """Everything a plan depends on but the lengths; also its key."""

    kind: str  # decode, decode_tc, paged_fa2, paged_fa3, ragged_fa2, ragged_fa3, mla_fa2, mla_fa3
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str
    options: Options
    rope_dim: int = 0  # of latent attention: the part of a key that carries the position


def problem_of(
    kind: str, query: Tensor, cache: Tensor, page_size: int, options: Options, layout: str = "NHD"
) -> Problem:
    """The problem of a call. One query sees its whole context: nothing is masked then, and the keys may be split."""
    if kind[0] == "d" and options.causal:
        options = options._replace(causal=False)
    kv_heads = cache.shape[-2 if layout == "NHD" else -3]
    *_, heads, head_dim = query.shape
    return Problem(kind, heads, kv_heads, head_dim, page_size, query.dtype, cache.dtype, layout, options)


class Lengths(NamedTuple):
    """A batch on the host: lengths, where each sequence's pages begin, and (on the device) the page numbers."""

    queries: Sequence[int]
    contexts: Sequence[int]
    starts: Tensor  # int32 [B + 1]: of pages, or of packed keys
    pages: Tensor | None
    last: Tensor | None  # int32 [B]


@dataclass(slots=True, eq=False)
class Slot:
    """A wrapper and the moment its last plan had left the pinned memory."""

    wrapper: Any
    copied: torch.cuda.Event | None = None


_SPARE = 4  # wrappers kept for a place and kind beyond those in use

Key = tuple[Place, str, str]
_free: dict[Key, list[Slot]] = {}


class Plan:
    """One planned wrapper. `run` may be called by several threads; a fixed one belongs to a captured graph.

    `buffers` of a fixed one: query starts, page starts, pages, last page lengths (see `buffers_of`).
    """

    __slots__ = ("_dead", "_key", "_launch", "_slot", "fixed", "problem", "scratch")
    room: int | None = GRAPH  # scratch memory of a fixed one to begin with
    grows = True  # whether the wrapper can be given more of it

    def __init__(
        self,
        problem: Problem,
        where: Place,
        device: torch.device,
        lengths: Lengths,
        buffers: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.problem = problem
        self.fixed = buffers is not None
        self._key = (where, problem.kind, problem.layout)
        self._launch: Launch | None = None
        self.scratch = Workspace(device, self.room) if self.fixed else workspace(where, device)
        self._slot = (None if self.fixed else take(self._key)) or Slot(self._wrapper(*(buffers or (None,) * 4)))
        self.make(lengths)

    def __del__(self) -> None:
        slot = getattr(self, "_slot", None)
        if slot is not None and not self.fixed:
            give(self._key, slot)

    def replan(self, batch: PagedBatch) -> None:
        """The numbers of the batch have changed: plan into the same buffers."""
        refuse_planning("batch.update")
        self.make(lengths_of(batch, self.problem.page_size))

    def make(self, lengths: Lengths) -> None:
        """Plan for these lengths, after any earlier plan of the wrapper has been read."""
        slot, problem = self._slot, self.problem
        before = launch_of(slot.wrapper) if self.fixed else None
        with self.scratch.lock:
            if slot.copied is not None:
                slot.copied.synchronize()
            self._plan_with_room(slot.wrapper, lengths, may_grow=before is None and self.grows)
            slot.copied = mark(self.scratch.device)
        # A graph launches what it was captured with: a plan that would launch anything else must not be replayed.
        if before is not None and launch_of(slot.wrapper) != before:
            what = "these lengths need another launch than the captured one; capture again"
            raise CudaGraphUnsafeError(code="GRAPH_CAPTURE_FAILED", value=what)
        self._dead = no_keys(problem.options.causal, lengths.queries, lengths.contexts)
        if problem.kind[0] == "d":
            self._launch = decode_launch(slot.wrapper, problem.layout, problem.options)

    def _plan_with_room(self, wrapper: Any, lengths: Lengths, *, may_grow: bool) -> None:
        """With more scratch memory, where the plan says that what there is does not suffice; never behind a graph."""
        while True:
            try:
                return self._plan(wrapper, lengths)
            except RuntimeError as error:
                if "AlignedAllocator" not in str(error) or not may_grow or not self.scratch.grow():
                    raise
                wrapper.reset_workspace_buffer(self.scratch.batch, wrapper._int_workspace_buffer)

    def _wrapper(self, starts_q: Buffer, starts: Buffer, pages: Buffer, last: Buffer) -> Any:
        kind, _, backend = self.problem.kind.partition("_")
        room, layout = self.scratch.batch, self.problem.layout
        if kind == "decode":
            return lib().BatchDecodeWithPagedKVCacheWrapper(
                room, layout, use_cuda_graph=self.fixed, use_tensor_cores=backend == "tc",
                paged_kv_indptr_buffer=starts, paged_kv_indices_buffer=pages, paged_kv_last_page_len_buffer=last,
                backend="fa2",
            )  # fmt: skip
        if kind == "paged":
            return lib().BatchPrefillWithPagedKVCacheWrapper(
                room, layout, use_cuda_graph=self.fixed, qo_indptr_buf=starts_q, paged_kv_indptr_buf=starts,
                paged_kv_indices_buf=pages, paged_kv_last_page_len_buf=last, backend=backend,
            )  # fmt: skip
        return lib().BatchPrefillWithRaggedKVCacheWrapper(room, layout, backend=backend)

    def _plan(self, wrapper: Any, lengths: Lengths) -> None:
        kind, heads, kv_heads, head_dim, page_size, dtype, kv_dtype, _, options, _ = self.problem
        queries = () if kind[0] == "d" else offsets(lengths.queries)
        pages, size = ((), ()) if kind[0] == "r" else ((lengths.pages, lengths.last), (page_size,))
        masked = {} if kind[0] == "d" else {"causal": options.causal}
        wrapper.plan(
            *queries, lengths.starts, *pages, heads, kv_heads, head_dim, *size, **masked, pos_encoding_mode="NONE",
            window_left=options.window, logits_soft_cap=options.softcap, sm_scale=options.scale, q_data_type=dtype,
            kv_data_type=kv_dtype, non_blocking=True,
        )  # fmt: skip

    def run(self, query: Tensor, key: Tensor, value: Tensor, return_lse: bool) -> Any:
        """Packed queries [T, H, D] over pages, or over packed keys; (out, natural log-sum-exp [T, H]) when asked."""
        launch, problem = self._launch, self.problem
        turned = problem.options.turned
        if turned != 1.0:
            query = query * turned
        if launch is not None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device) if return_lse else None
            with self.scratch.lock:
                launch(query, key, value, out, lse)
            if lse is None and not self._dead:
                return out
        else:
            wrapper = self._slot.wrapper
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
        return self._finished(out, None if lse is None else lse.mul_(LN2))

    def _finished(self, out: Tensor, lse: Tensor | None) -> Any:
        """The result, with rows that attend nothing as the op has them."""
        if self._dead and not self.fixed:
            bury(out, lse, self._dead)
        if lse is None:
            return out
        return out, unwritten(lse) if self.fixed else lse


def plan_batch(problem: Problem, where: Place, batch: PagedBatch, kind: type[Plan] = Plan) -> Plan:
    """A plan for a batch that has none for such calls yet; for a captured graph, where the batch is made for it."""
    refuse_planning("this batch has no plan yet")
    buffers = buffers_of(batch) if batch.capture else None
    return kind(problem, where, batch.block_tables.device, lengths_of(batch, problem.page_size), buffers)


def lengths_of(batch: PagedBatch, page_size: int) -> Lengths:
    """A batch as a plan takes it. Only the page numbers are read on the device."""
    starts, places, last = batch.page_places(page_size)
    pages = batch.block_tables.reshape(-1).index_select(0, places).to(torch.int32)
    return Lengths(batch.query_lens_host, batch.context_lens_host, starts, pages, last)


def buffers_of(batch: PagedBatch) -> tuple[Tensor, ...]:
    """Fixed room for a graph: query starts, page starts, as many pages as the tables can name, last page lengths."""
    count, room = batch.batch_size, max(1, batch.block_tables.numel())
    device = batch.block_tables.device
    return tuple(torch.zeros(n, dtype=torch.int32, device=device) for n in (count + 1, count + 1, room, count))


def launch_of(wrapper: Any) -> list[int] | None:
    """The part of a plan that a captured launch holds by value: grid, template and offsets; None before the first."""
    found = getattr(wrapper, "_plan_info", None)
    return None if found is None else [int(number) for number in found]


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
    """A wrapper that nobody uses any more, for the same place and kind; atomic, like `give`."""
    try:
        return _free[key].pop()
    except LookupError:
        return None


def give(key: Key, slot: Slot) -> None:
    """Keep a wrapper for the next batch; called when a plan is garbage."""
    free = _free.setdefault(key, [])
    if len(free) < _SPARE:
        free.append(slot)  # atomic; a lock here could wait for itself


# -- the launch of a decode wrapper without its public `run` ---------------------------------------------------------
# `run` of a decode wrapper checks and converts for several µs what a plan has settled: dtypes, layout, scale, buffers.
# The function it ends in takes all of it as arguments. Only a function whose parameters are the known ones is called; a
# release in which they have changed is called by its public door.
_ORDER = {"NHD": 0, "HND": 1}  # FlashInfer's numbers for the two orders of a cache
_TENSOR_CORES = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q", "paged_k_cache", "paged_v_cache",
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "o", "maybe_lse", "mask_mode",
    "layout", "window_left", "enable_pdl", "maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes",
    "maybe_prefix_len_ptr", "maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr", "logits_soft_cap", "sm_scale",
    "scale_q", "scale_k", "scale_v", "rope_scale", "rope_theta", "token_pos_in_items_len", "workspace_size",
)  # fmt: skip
_CUDA_CORES = (
    "float_workspace_buffer", "int_workspace_buffer", "plan_info_vec", "q", "paged_k_cache", "paged_v_cache",
    "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "o", "maybe_lse", "kv_layout_code", "window_left",
    "enable_pdl", "alibi_slopes", "logits_soft_cap", "sm_scale", "rope_scale", "rope_theta",
)  # fmt: skip

_known_call = lru_cache(maxsize=64)(starts_with)  # a module's function is made once; a plan is made at each step


@lru_cache(maxsize=16)
def _dependent_launch(device: torch.device) -> bool:
    """Whether a launch may begin before the one ahead of it has ended: what FlashInfer's `run` chooses from SM 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def decode_launch(wrapper: Any, layout: str, options: Options) -> Launch | None:
    """The launch of a decode wrapper that has just been planned; None where only its public door is known."""
    cores = getattr(wrapper, "use_tensor_cores", None)
    module = getattr(wrapper, "_cached_module", None)
    call = getattr(module, "paged_run" if cores else "run", None)
    if cores is None or call is None or not _known_call(call, _TENSOR_CORES if cores else _CUDA_CORES):
        return None
    try:
        first = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._plan_info
        pages = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
        ends = (wrapper._qo_indptr_buf,) if cores else ()
        early, size = _dependent_launch(first[0].device), first[0].numel()
    except AttributeError:
        return None
    shape = (_ORDER[layout], options.window, early)
    numbers = (options.softcap, options.scale)
    if cores:
        rest: tuple[Any, ...] = (
            0, *shape, None, None, None, None, None, None, *numbers, None, None, None, 1.0, 1e4, 0, size
        )  # fmt: skip
    else:
        rest = (*shape, None, *numbers, 1.0, 1e4)

    def launch(query: Any, keys: Any, values: Any, out: Any, lse: Any) -> None:
        call(*first, query, keys, values, *ends, *pages, out, lse, *rest)

    return launch
