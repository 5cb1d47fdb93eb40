"""From a function to a graph of it: warm up, prove, capture, compare.

rehearse   the function runs on the capture's stream, selecting as in a capture; kernels that raise are set aside
prove      (strict) each kernel by itself, then the whole function, into a graph that is thrown away
capture    into the same memory pool: what the dummy took is there, so nothing is allocated any more
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from layerzero.dispatch.run import current_world
from layerzero.errors import CudaGraphUnsafeError, from_outside, invalid, one_line
from layerzero.graphs.rehearsal import CaptureReport, Seen, Watch, rehearsal
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.runtime.current import collector_paused


def initialise(stream: Any) -> tuple[str, ...]:
    """Make the handles and workspaces of cuBLAS, cuBLASLt and cuDNN exist for this stream; their names.

    Each is created at a library's first call on a stream, with an allocation, which would then stand in the graph.
    """
    found = ["cublas"]
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        narrow = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        for dtype in (torch.float32, narrow):
            square = torch.ones(16, 16, device=stream.device, dtype=dtype)
            torch.mm(square, square)
            F.linear(square, square, square[0])  # a product with a bias is cuBLASLt's
        found.append("cublaslt")
        if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            image, kernel = (torch.ones(1, 1, size, size, device=stream.device, dtype=narrow) for size in (8, 3))
            F.conv2d(image, kernel)
            found.append("cudnn")
    stream.synchronize()
    return tuple(found)


def capture_on(stream: Any, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
    """Capture one run on this stream into a memory pool: (graph, what the run returned).

    Only what this thread does can spoil it: another may allocate or compile meanwhile. Raises what the run raises; the
    process is then as before, and another capture may follow. cuBLAS keeps a workspace for each stream, which others in
    the process may free (torch.compile does, before its own graphs): dropped here, it is made anew inside the capture
    and stays in the graph's pool.
    """
    gc.collect()  # what dies inside a capture gives memory back there
    graph = torch.cuda.CUDAGraph()
    with collector_paused(), torch.cuda.stream(stream):
        stream.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            out = run()
        except BaseException:
            try:
                graph.capture_end()  # the stream must leave the capture, whatever has become of it
            except RuntimeError:
                _mend(stream, pool)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            _mend(stream, pool)
            raise
    return graph, out


def _mend(stream: Any, pool: Any) -> None:
    """Undo what an invalid capture leaves behind: an allocator that fills the pool, a generator that counts for it.

    torch ends both only after a good end, so the allocator is told here, and an empty capture ends the generator's.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):  # it had been ended already
            getattr(torch._C, name)(stream.device_index, pool)
    spot = torch.zeros(1, device=stream.device)
    stream.synchronize()
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    spot.add_(1)
    empty.capture_end()


@dataclass(frozen=True)
class Settings:
    """How to capture: warm-up runs, the stream, the memory pool, whether a dummy comes first, bytes it may grow by."""

    warmup: int
    stream: Any
    pool: Any
    strict: bool
    memory_limit: int

    def __post_init__(self) -> None:
        for name, least, limit in (("warmup", 1, "1 or more"), ("memory_limit", 0, "0 or more bytes")):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise invalid("VALUE_INVALID", f"{name}={given}", limit)


# What may stand among the inputs beside tensors, and is compared by value.
_PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))


class Inputs:
    """Copies of the tensors among some arguments, at any depth of lists, tuples and dicts; all else as it is."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [item.detach().clone() if isinstance(item, Tensor) else item for item in leaves]
        self.args, self.kwargs = pytree.tree_unflatten(self._leaves, self._spec)

    @property
    def tensors(self) -> list[Tensor]:
        return [item for item in self._leaves if isinstance(item, Tensor)]

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write other tensors of the same shapes and dtypes into place; all else has to be what it was."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise _changed(f"{len(leaves)} values", f"{len(self._leaves)} values, arranged as captured")
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                if not isinstance(given, Tensor):
                    raise _changed(type(given).__name__, "a tensor")
                if own.shape != given.shape or own.dtype != given.dtype:
                    raise _changed(_words(given), _words(own))
            elif own is not given and not (isinstance(own, _PLAIN) and type(own) is type(given) and own == given):
                raise _changed(repr(given)[:80], repr(own)[:80])
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor) and own is not given:
                own.copy_(given, non_blocking=True)


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _changed(value: str, limit: str) -> CudaGraphUnsafeError:
    return CudaGraphUnsafeError(code="GRAPH_INPUT_CHANGED", value=value, limit=limit)


class GraphedCall:
    """A function as a CUDA graph. Call it with other tensors of the same shapes; what it returns has a fixed place too.

    The outputs are overwritten by the next call: read or clone them before. Calls may come from different streams, one
    waits for the other; whoever reads an output on another stream has to wait as ever. `report` says which kernels are
    in the graph: these stay, whatever is published later. `replay()` runs it on the inputs as they are.
    """

    def __init__(self, graph: Any, inputs: Inputs, outputs: Any, report: CaptureReport, keep: Any) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.report = report
        self._graph = graph
        self._keep = keep  # the function: what it closes over lies in the graph by its address
        make: Any = torch.cuda.Event
        self._done = make()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        self.inputs.fill(args, kwargs)
        return self._run()

    def replay(self) -> Any:
        self._follow()
        return self._run()

    def _follow(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._done)

    def _run(self) -> Any:
        self._graph.replay()
        self._done.record(torch.cuda.current_stream(self.device))
        return self.outputs

    @property
    def device(self) -> torch.device:
        return self.inputs.tensors[0].device

    @property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        return self.report.kernels

    @property
    def pool(self) -> Any:
        """The memory pool, for another capture that never runs at the same time."""
        return self._graph.pool()


class _Refused(Exception):
    """A kernel may not stand in this graph; the selection goes on without it."""

    def __init__(self, kernel_id: str, why: Reason) -> None:
        super().__init__(f"{kernel_id}: {why}")
        self.kernel_id = kernel_id
        self.why = why


def capture(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], how: Settings) -> GraphedCall:
    """Capture `function(*args, **kwargs)`. A kernel that cannot stand in it is set aside, with the reason, and the
    selection repeated; where no kernel is left, or the function's own code is in the way, CudaGraphUnsafeError says so.
    """
    device = _device(args, kwargs)
    inputs = Inputs(args, kwargs)
    make: Any = torch.cuda.Stream
    stream = make(device) if how.stream is None else how.stream
    if stream == torch.cuda.default_stream(device):
        told = "the default stream cannot be captured"
        raise CudaGraphUnsafeError(code="GRAPH_CAPTURE_FAILED", value=told, hint="pass another stream, or none")
    stream.wait_stream(torch.cuda.current_stream(device))
    refused: dict[str, Reason] = {}
    with torch.cuda.device(device), torch.no_grad():
        ready = initialise(stream)
        while True:  # ends: each round sets one kernel aside, and without any left the selection refuses
            try:
                made = _attempt(function, inputs, stream, how, refused)
                break
            except _Refused as found:
                refused[found.kernel_id] = found.why
            except CudaGraphUnsafeError as error:
                if not refused:
                    raise
                lines = "".join(f"\n  {kernel_id}: {why}" for kernel_id, why in refused.items())
                reasons = (*error.reasons, *refused.values())
                raise CudaGraphUnsafeError(f"{error}{lines}", reasons=reasons) from error
    torch.cuda.current_stream(device).wait_stream(stream)
    made.report = replace(made.report, initialised=ready, refused=dict(refused))
    return made


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    found = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if not torch.cuda.is_available():
        raise CudaGraphUnsafeError(code="GRAPH_NO_DEVICE", value="this process has no CUDA device")
    place = next((item.device for item in found if item.is_cuda), None)
    if place is None:
        where = ", ".join(sorted({str(item.device) for item in found})) or "no tensors among the inputs"
        raise CudaGraphUnsafeError(code="GRAPH_NO_DEVICE", value=where)
    return place


def _attempt(
    function: Callable[..., Any], inputs: Inputs, stream: Any, how: Settings, refused: dict[str, Reason]
) -> GraphedCall:
    """One round: rehearse, prove, capture, without the kernels that were refused so far."""
    watch = Watch()

    def run() -> Any:
        return function(*inputs.args, **inputs.kwargs)

    pool = torch.cuda.graph_pool_handle() if how.pool is None else how.pool
    with rehearsal(watch, refused):
        with torch.cuda.stream(stream):
            for _ in range(how.warmup):
                _blaming(run, watch)
            stream.synchronize()
        seen = watch.take()
        dummy: Any = None
        if how.strict:
            _prove(seen, stream, how.memory_limit)
            # Kept until the real one stands: with it the pool keeps its memory; not its outputs, whose place is needed.
            dummy = _captured(run, watch, seen, stream, pool, how)[0]
            watch.take()
        device = inputs.tensors[0].device
        before = torch.cuda.memory_reserved(device)
        graph, out = _captured(run, watch, seen, stream, pool, how)
        grown = torch.cuda.memory_reserved(device) - before
        if how.strict and grown > how.memory_limit:
            raise CudaGraphUnsafeError(code="GRAPH_MEMORY_GROWS", value=grown, limit=how.memory_limit)
        kernels = tuple((item.context.op, item.bound.kernel_id) for item in watch.take())
    del dummy
    report = CaptureReport(
        True, kernels, warmups=how.warmup, memory_delta=grown, dummy=how.strict, refused=dict(refused)
    )
    return GraphedCall(graph, inputs, out, report, (function, stream))


def _prove(seen: tuple[Seen, ...], stream: Any, limit: int) -> None:
    """Each kernel by itself; the first that cannot stand in a graph is refused."""
    distinct = {(item.context, item.bound.kernel_id): item for item in reversed(seen) if item.args}
    for item in distinct.values():
        why = _objection(item, stream, 0 if limit == 0 else min(limit, _KEPT))
        if why is not None:
            raise _Refused(item.bound.kernel_id, why)


# Bytes one call of one kernel may keep; a thousand replays' worth of it would still be small.
_KEPT = 512
_RUNS = 3


def _objection(item: Seen, stream: Any, limit: int) -> Reason | None:
    """What speaks against this kernel inside a graph, by trying it on the arguments of its call; None: nothing.

    It has run before, so what it allocates once is there already. `limit` is how many bytes it may keep a call.
    """
    run, args = item.bound.run, _own(item)
    kept = []
    try:
        with torch.cuda.stream(stream):
            for _ in range(_RUNS):
                before = torch.cuda.memory_allocated(stream.device)
                run(*args)  # the result is dropped, and its memory with it
                kept.append(torch.cuda.memory_allocated(stream.device) - before)
        # The least of them: another thread may allocate during one run, hardly during each.
        if min(kept) > limit:
            return reason("GRAPH_MEMORY_GROWS", min(kept), limit)
        capture_on(stream, lambda: run(*args), torch.cuda.graph_pool_handle())
    except Exception as error:
        if from_outside(error):
            raise
        return reason("GRAPH_CAPTURE_FAILED", one_line(error, 300))
    return None


def _own(item: Seen) -> tuple[Any, ...]:
    """The arguments, copied where the op writes into them: the caller's must not be written twice."""
    spec = current_world().ops[item.context.op]
    if spec.mutates is None or not spec.mutates(item.args):
        return item.args
    return tuple(part.clone() if isinstance(part, Tensor) else part for part in item.args)


def _captured(
    run: Callable[[], Any], watch: Watch, seen: tuple[Seen, ...], stream: Any, pool: Any, how: Settings
) -> tuple[Any, Any]:
    try:
        return capture_on(stream, lambda: _blaming(run, watch), pool)
    except (_Refused, CudaGraphUnsafeError):
        raise
    except Exception as error:
        if from_outside(error):
            raise
        if isinstance(error, RuntimeError):
            _prove(seen, stream, how.memory_limit)  # a capture that only its end finds spoilt: by whom?
        raise CudaGraphUnsafeError(code="GRAPH_CAPTURE_FAILED", value=one_line(error, 300)) from error


def _blaming(run: Callable[[], Any], watch: Watch) -> Any:
    """Run; what a kernel of ours raises is held against that kernel."""
    try:
        return run()
    except CudaGraphUnsafeError as error:
        if error.code is not ReasonCode.GRAPH_CAPTURE_FAILED or not watch.seen:
            raise
        why = reason("GRAPH_CAPTURE_FAILED", one_line(error.__cause__ or error, 300))
        raise _Refused(watch.seen[-1].bound.kernel_id, why) from error
