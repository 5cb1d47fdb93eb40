"""Inputs like those of a call, and running a kernel on them for the compiler's sake."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context

_SHARED_BYTES = 64 * 2**20  # a larger tensor is not copied for a compile, but read as it is


def likeness(args: tuple[Any, ...], *, share: bool = True) -> tuple[Any, ...]:
    """Arguments with the same metadata. Small tensors are copied; of large floating ones the storage is shared.

    Results are thrown away, so what the numbers are does not matter; indices are copied, since they must stay valid.
    `share=False` copies everything, for a call that writes into its inputs.
    """
    return tuple(_like(item, share) for item in args)


def _like(item: Any, share: bool) -> Any:
    if isinstance(item, torch.Generator):
        return torch.Generator(item.device)
    if not isinstance(item, Tensor):
        return item
    with torch.no_grad():
        if share and item.is_floating_point() and item.nbytes > _SHARED_BYTES:
            found = item.detach()
        else:
            found = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
            found.copy_(item)
    return found.requires_grad_(item.requires_grad) if item.is_floating_point() else found


def exercise(run: Callable[..., Any], args: tuple[Any, ...], ctx: Context) -> None:
    """Run a kernel once, backward too when the call would, under the call's autocast and on a stream of its own."""
    with ExitStack() as stack:
        if ctx.autocast is not None:
            stack.enter_context(torch.autocast(ctx.device.device_type, getattr(torch, ctx.autocast)))
        stream = None
        if ctx.device.device_type == "cuda":
            stack.enter_context(relaxed_capture())
            where = next(item.device for item in args if isinstance(item, Tensor))
            stack.enter_context(torch.cuda.device(where))  # a thread begins on the first one
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
        if not ctx.needs_grad:
            stack.enter_context(torch.no_grad())
        out = run(*args)
        if ctx.needs_grad:
            _backward(out)
        if stream is not None:
            stream.synchronize()


def _backward(out: Any) -> None:
    found = [item for item in (out if isinstance(out, tuple) else (out,)) if isinstance(item, Tensor)]
    wanted = [item for item in found if item.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(item) for item in wanted])


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate while another captures a CUDA graph; in CUDA's default mode that ends the capture."""
    library = _cudart()
    if library is None:
        yield
        return
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed; the call exchanges it with the thread's own
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _cudart() -> Any:
    """The CUDA runtime that torch has loaded, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next((line.split()[-1] for line in maps if "libcudart.so" in line), None)
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None
