"""The device's side of a capture: libraries made ready on its stream, the capture, what a failed one leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from layerzero.runtime.current import collector_paused


def new_stream(device: torch.device) -> Any:
    """A stream that is not the default one: on that no capture can begin."""
    make: Any = torch.cuda.Stream
    return make(device)


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


def reserved(device: torch.device) -> int:
    """Bytes that torch holds of the device's memory."""
    return int(torch.cuda.memory_reserved(device))


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
