"""Memory that parent and child share: a host file that both map, and of the parent's side all arenas (`Memory`).

The host file has no name (memfd on Linux; elsewhere POSIX shared memory that is unlinked as soon as it is open), so a
process that dies leaves nothing in /dev/shm: the memory goes with the last descriptor. It is sealed against
shrinking, because a mapping behind which the file ends kills its reader. Only the parent makes it larger.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from layerzero.isolation.device_arena import DeviceArena, DriverError, device_name
from layerzero.isolation.wire import ChildOutOfMemory, Malformed, Placed, fault, span
from layerzero.reasons import reason

NAME = "host"
ALIGNMENT = 256
_SMALL = 4_096


def anonymous_file(size: int) -> int:
    """A descriptor of `size` bytes of shared memory without a name."""
    if hasattr(os, "memfd_create"):
        import fcntl

        handle = os.memfd_create("layerzero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, size)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return handle
    posix: Any = __import__("_posixshmem")  # what multiprocessing.shared_memory stands on
    name = f"/layerzero-{uuid.uuid4().hex[:16]}"
    handle = posix.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    posix.shm_unlink(name)
    os.ftruncate(handle, size)
    return int(handle)


class Arena:
    """A mapping of the shared file. Tensors seen through it keep the mapping alive, so it may be replaced freely."""

    def __init__(self, handle: int, size: int) -> None:
        self.handle = handle
        self.size = size
        self._map = mmap.mmap(handle, size)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> Arena:
        """New memory; pages are taken when they are first written."""
        return cls(anonymous_file(size), size)

    def grown(self, size: int) -> Arena:
        """The same file, larger, mapped anew."""
        os.ftruncate(self.handle, size)
        return Arena(self.handle, size)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes when the last tensor over it does."""
        with contextlib.suppress(OSError):
            os.close(self.handle)


class Bump:
    """Allocates in an arena, one tensor after the other, for one call."""

    __slots__ = ("arena", "buffer", "used")

    def __init__(self, arena: str, buffer: Tensor, used: int = 0) -> None:
        self.arena = arena
        self.buffer = buffer
        self.used = used

    def put(self, tensor: Tensor) -> Placed:
        """Copy a tensor in, strides kept. The caller has made room for its `sent_bytes`."""
        flat, strides = compact(tensor)
        offset = -(-self.used // ALIGNMENT) * ALIGNMENT
        nbytes = flat.numel() * flat.element_size()
        if nbytes:
            self.buffer[offset : offset + nbytes].copy_(flat.view(torch.uint8))
        self.used = offset + nbytes
        return Placed(self.arena, offset, nbytes, flat.dtype, tuple(tensor.shape), strides)


def compact(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(a flat tensor of the elements to send, the strides to see them with).

    Strides are kept where the view touches little more than its own elements: transposed, padded and broadcast
    tensors arrive as they are. A slice of something large is gathered instead.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    shape, strides = tuple(tensor.shape), tensor.stride()
    reach = span(shape, strides)
    if reach <= max(2 * tensor.numel(), _SMALL):
        return tensor.as_strided((reach,), (1,)), strides
    gathered = tensor.contiguous()
    return gathered.view(-1), gathered.stride()


def sent_bytes(tensor: Tensor) -> int:
    """Room a tensor takes in an arena, padding included."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    reach = span(shape, strides)
    count = reach if reach <= max(2 * tensor.numel(), _SMALL) else tensor.numel()
    return -(-count * tensor.element_size() // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def buffer_of(arenas: Mapping[str, Any], name: str) -> Tensor:
    """The bytes of one of these arenas; a name that the other side made up is not believed."""
    if name not in arenas:
        raise Malformed(f"no arena is called {name[:40]!r}")
    found: Tensor = arenas[name].bytes
    return found


def view(buffer: Tensor, placed: Placed) -> Tensor:
    """A placed tensor as a view of its arena. Raises Malformed when it does not lie inside."""
    end = placed.offset + placed.nbytes
    if end > buffer.numel() or placed.offset % ALIGNMENT or placed.nbytes % placed.dtype.itemsize:
        raise Malformed(f"bytes {placed.offset} to {end} of an arena of {buffer.numel()}")
    if not placed.nbytes:
        return torch.empty_strided(placed.shape, placed.strides, dtype=placed.dtype, device=buffer.device)
    flat = buffer[placed.offset : end].view(placed.dtype)
    return flat.as_strided(placed.shape, placed.strides)


_MIB = 1 << 20


class Memory:
    """Arenas shared with one child, and what it has been told of them."""

    def __init__(self, arena_mb: float, limit_mb: float) -> None:
        self.host = Arena.create(int(arena_mb * _MIB))
        self._limit = int(limit_mb * _MIB)
        self._devices: dict[str, DeviceArena] = {}
        self._untold: set[str] = set()
        self._retired: list[DeviceArena] = []

    def make_room(self, needed: Mapping[str, int]) -> None:
        """Grow the arenas that are smaller than asked; results are usually no larger than what went in."""
        for name, size in needed.items():
            if size > self._limit:
                raise fault("ISOLATION_NO_ROOM", size, self._limit)
            if name == NAME:
                if size > self.host.size:
                    self.host = self.host.grown(min(self._limit, _rounded(size)))
            elif name not in self._devices or size > self._devices[name].size:
                self._enlarge(name, min(self._limit, max(_rounded(size), 16 * _MIB)))

    def _enlarge(self, name: str, size: int) -> None:
        index = int(name.partition(":")[2])
        try:
            made = DeviceArena(index, size)
        except DriverError as error:
            if "error 2" in str(error):
                raise ChildOutOfMemory(reason("OUT_OF_MEMORY", str(error))) from error
            raise fault("ISOLATION_UNSUPPORTED", f"memory of {name} ({error})", "tensors on the CPU") from error
        if name in self._devices:
            self._retired.append(self._devices[name])
        self._devices[name] = made
        self._untold.add(name)

    def needed(self, tensors: Iterable[Tensor]) -> dict[str, int]:
        """Bytes by arena that these tensors take, and as much again for what comes back."""
        total: dict[str, int] = {NAME: 0}
        for item in tensors:
            name = home(item)
            total[name] = total.get(name, 0 if name == NAME else ALIGNMENT) + 2 * sent_bytes(item)
        return total

    def bumps(self, names: Iterable[str]) -> dict[str, Bump]:
        return {name: Bump(name, self._buffer(name), 0 if name == NAME else ALIGNMENT) for name in names}

    def told(self) -> dict[str, Any]:
        """The arenas as a CALL frame describes them; the handle of one goes with the first frame that needs it."""
        found: dict[str, Any] = {NAME: {"bytes": self.host.size}}
        for name, arena in self._devices.items():
            new = name in self._untold
            handle, mark = (arena.handle.hex(), arena.mark.hex()) if new else (None, None)
            found[name] = {"index": arena.index, "bytes": arena.size, "handle": handle, "mark": mark}
        return found

    def acknowledged(self) -> None:
        """The child has obeyed a frame with `told` in it: it has opened the new arenas and closed the old ones."""
        for name in self._untold:
            if not self._devices[name].shared():
                raise Malformed(f"the child sees other memory than this process at {name}")
        self._untold.clear()
        self._close_retired()

    def new_child(self) -> None:
        """The next child knows no device arena yet, and nobody looks at the retired ones."""
        self._untold.update(self._devices)
        self._close_retired()

    def _close_retired(self) -> None:
        for arena in self._retired:
            arena.close()
        self._retired.clear()

    def take(self, placed: Placed) -> Tensor:
        """A result, copied out of its arena: the next call overwrites it."""
        seen = view(self._buffer(placed.arena), placed)
        with nullcontext() if placed.arena == NAME else torch.cuda.device(seen.get_device()):
            # The same strides where they are dense, else a contiguous copy: clone does just that.
            return seen.clone(memory_format=torch.preserve_format)

    def _buffer(self, name: str) -> Tensor:
        return buffer_of({NAME: self.host, **self._devices}, name)

    def close(self) -> None:
        """Free everything; the child is gone."""
        self.host.close()
        self._retired += self._devices.values()
        self._devices.clear()
        self._close_retired()


def home(item: Tensor) -> str:
    """The arena a tensor belongs to."""
    if item.is_cuda:
        return device_name(item.get_device())
    if item.device.type != "cpu":
        raise fault("ISOLATION_UNSUPPORTED", f"a tensor on {item.device}", "tensors on the CPU or a CUDA GPU")
    return NAME


def _rounded(size: int) -> int:
    return 1 << max(20, (size - 1).bit_length())
