"""The dispatcher of another process, read from its memory: what code in that process says about it does not matter.

A forked process has torch's objects at the same addresses as its parent, so the parent knows where to look. How the
dispatcher lies in memory is not promised by torch: `Dispatcher.find` compares what it reads in its own memory with what
torch says, and sees a change that it makes itself in a fork; where either fails there is no answer, and callers say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_SINGLETON: Final = "_ZN3c1010Dispatcher13realSingletonEv"
# A node of the list of ops: two links, then name and overload as strings of 32 bytes, then what is registered.
_NAMES: Final = 16
_AFTER: Final = 80
_MAX_OPS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Where the dispatcher of this process, and of its forks, lies."""

    address: int
    size: int

    @classmethod
    def find(cls) -> Self | None:
        """The dispatcher of this process, or None where its memory does not look as known."""
        import torch

        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            singleton = getattr(library, _SINGLETON)
            singleton.restype = ctypes.c_void_p
            usable = ctypes.CDLL(None).malloc_usable_size
            usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
            address = int(singleton())
            with _memory(os.getpid()) as memory:
                size = int(usable(struct.unpack("<Q", os.pread(memory, 8, address))[0]))
            found = cls(address, size)
            if not _AFTER < size < 65536 or set(found.read(os.getpid())) != set(torch._C._dispatch_get_all_op_names()):
                return None
            return found if found._sees_a_change() else None
        except (OSError, AttributeError, struct.error, ValueError):
            return None

    def read(self, pid: int) -> Mapping[str, bytes]:
        """Op name → what its memory holds, of a process that stands still. Raises OSError or ValueError."""
        found: dict[str, bytes] = {}
        with _memory(pid) as memory:
            (node,) = struct.unpack("<Q", os.pread(memory, 8, self.address))
            while node != self.address:
                data = os.pread(memory, self.size, node)
                if len(data) < _AFTER or len(found) > _MAX_OPS:
                    raise ValueError("the list of ops has no end")
                text = []
                for at in (_NAMES, _NAMES + 32):
                    place, length = struct.unpack_from("<QQ", data, at)
                    if length > 4096:
                        raise ValueError("an op's name is no text")
                    text.append(os.pread(memory, length, place).decode("utf-8") if length else "")
                found[".".join(text) if text[1] else text[0]] = data[_AFTER:]
                (node,) = struct.unpack_from("<Q", data)
        return found

    def changed(self, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> tuple[str, ...]:
        """Ops that were there before and are gone or different now; what an op caches for Python does not count."""
        return tuple(
            sorted(
                name
                for name, data in before.items()
                if data != after.get(name) and not _is_cache(data, after.get(name, b""))
            )
        )

    def _sees_a_change(self) -> bool:
        """Whether an op replaced in a fork is seen from here, and nothing else."""
        before = self.read(os.getpid())
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                import warnings

                import torch

                warnings.simplefilter("ignore")
                library = torch.library.Library("aten", "IMPL")
                library.impl("special_zeta", lambda x, y: x, "CPU")
                os.write(ready[1], b"x")
                os.close(done[1])
                os.read(done[0], 1)
            finally:
                os._exit(0)
        os.close(ready[1])
        try:
            os.read(ready[0], 1)
            return self.changed(before, self.read(child)) == ("aten::special_zeta",)
        finally:
            for end in (ready[0], *done):
                os.close(end)
            os.waitpid(child, 0)


def _is_cache(one: bytes, other: bytes) -> bool:
    """Whether the one word that differs was empty: a registration also changes the count of registrations."""
    if len(one) != len(other):
        return False
    places = [at for at in range(0, len(one), 8) if one[at : at + 8] != other[at : at + 8]]
    return len(places) == 1 and not any(one[places[0] : places[0] + 8])


@contextlib.contextmanager
def _memory(pid: int) -> Iterator[int]:
    handle = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
