"""The parent's arenas: host memory from the start, memory of a GPU when a call first needs it. They only grow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from layerzero.isolation.arena import ALIGNMENT, NAME, Arena, Bump, sent_bytes, view
from layerzero.isolation.device_arena import DeviceArena, DriverError, device_name, named_arena
from layerzero.isolation.values import Malformed, Placed
from layerzero.isolation.wire import ChildOutOfMemory, fault
from layerzero.reasons import reason

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
        if name == NAME:
            return self.host.bytes
        return named_arena(self._devices, name).bytes

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
