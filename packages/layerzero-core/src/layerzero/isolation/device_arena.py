"""GPU memory shared with the child: CUDA IPC over the driver's own calls.

The parent allocates with cuMemAlloc, exports a 64-byte handle once, and the child opens it once; no handle is made or
opened per call. torch's own sharing is not used: it counts references in files of /dev/shm, and a child that is killed
never gives its count back. Here the parent frees the memory itself, after the child is gone.

Synchronisation: the parent copies inputs into the arena on the caller's current stream and waits for that stream
before it sends a frame; the child computes, copies its results into the arena and waits for its device before it
answers; the parent copies results out on the caller's current stream, and waits for that before the arena is used
again. So no event crosses the process boundary, and such a kernel can never be part of a captured graph.

That both sides see the same memory is not taken on trust: the parent leaves a random mark at the head of a new arena,
the child has to find it there and answer it beside, and the parent has to find the answer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_HANDLE_BYTES = 64
# The head of an arena: a mark of the parent's, and the child's answer to it.
MARK_BYTES = 32
_LAZY_PEER = 1


class DriverError(RuntimeError):
    """The CUDA driver refused; the text names the call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Exposed:
    """Raw device bytes as torch takes them; the tensor made from it keeps this object alive."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip


def _write(buffer: Tensor, at: int, data: bytes) -> None:
    buffer[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(buffer.device)
    torch.cuda.synchronize(buffer.device)


def _read(buffer: Tensor, at: int) -> bytes:
    return bytes(buffer[at : at + MARK_BYTES].tolist())


def _answer(mark: bytes) -> bytes:
    return bytes(255 - byte for byte in mark)


def device_name(index: int) -> str:
    """The name of a device's arena."""
    return f"cuda:{index}"


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be loaded: {error}") from None


def _check(what: str, code: int) -> None:
    if code:
        raise DriverError(f"{what} gave error {code}")


# Primary contexts are retained once and never released: the last release would destroy the context, and with it all
# memory of the device, in a process where torch has not taken it yet.
_contexts: dict[int, ctypes.c_void_p] = {}


@contextmanager
def _current(driver: Any, index: int) -> Iterator[None]:
    """Make the primary context of a device, torch's own, current on this thread."""
    if index not in _contexts:
        torch.cuda.synchronize(index)  # torch takes the context first
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _check("cuInit", driver.cuInit(0))
        _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
        _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _contexts[index] = context
    _check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(_contexts[index]))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class DeviceArena:
    """Device memory owned by this process, with the handle another may open it by."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._driver = _driver()
        pointer = ctypes.c_uint64()
        handle = _Handle()
        with _current(self._driver, index):
            code = self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            if code == 2:  # CUDA_ERROR_OUT_OF_MEMORY: torch may hold free blocks
                torch.cuda.empty_cache()
                code = self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
            _check("cuMemAlloc", code)
            self._pointer: int | None = int(pointer.value)
            try:
                _check("cuIpcGetMemHandle", self._driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer))
            except DriverError:
                self._free()
                raise
        self.handle = bytes(handle)
        self.bytes: Tensor = torch.as_tensor(_Exposed(self._pointer or 0, size), device=f"cuda:{index}")
        self.mark = os.urandom(MARK_BYTES)
        _write(self.bytes, 0, self.mark)

    def shared(self) -> bool:
        """Whether the other process has answered the mark: then it is the same memory, seen from both sides."""
        return _read(self.bytes, MARK_BYTES) == _answer(self.mark)

    def _free(self) -> None:
        if self._pointer is not None:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self._pointer))
            self._pointer = None

    def close(self) -> None:
        """Free the memory. The other process must have closed it or be gone; nothing may look at `bytes` any more."""
        if self._pointer is not None:
            torch.cuda.synchronize(self.index)
            with _current(self._driver, self.index):
                self._free()


class OpenedArena:
    """Device memory of another process, seen through its handle."""

    def __init__(self, index: int, size: int, handle: bytes) -> None:
        if len(handle) != _HANDLE_BYTES:
            raise DriverError(f"a handle of {len(handle)} bytes, expected {_HANDLE_BYTES}")
        self.index, self.size = index, size
        self._driver = _driver()
        pointer = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        with _current(self._driver, index):
            opened = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER))
            _check("cuIpcOpenMemHandle", opened)
        self._pointer = int(pointer.value)
        self.bytes: Tensor = torch.as_tensor(_Exposed(self._pointer, size), device=f"cuda:{index}")

    def answer(self, mark: bytes) -> None:
        """Find the mark of the parent in the memory and answer it beside; refuse memory that does not bear it."""
        if _read(self.bytes, 0) != mark:
            raise DriverError(f"the memory of {device_name(self.index)} that was opened is not the parent's")
        _write(self.bytes, MARK_BYTES, _answer(mark))

    def close(self) -> None:
        """Give the mapping back, once nothing runs on it."""
        torch.cuda.synchronize(self.index)
        with _current(self._driver, self.index):
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(self._pointer))
