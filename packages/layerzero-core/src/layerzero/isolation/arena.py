"""Shared host memory: one anonymous file that both processes map.

The file has no name (memfd on Linux; elsewhere POSIX shared memory that is unlinked as soon as it is open), so a
process that dies leaves nothing in /dev/shm: the memory goes with the last descriptor. It is sealed against
shrinking, because a mapping behind which the file ends kills its reader. Only the parent makes it larger.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from typing import Any

import torch
from torch import Tensor

from layerzero.isolation.values import Malformed, Placed, span

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

    def fits(self, nbytes: int) -> bool:
        return -(-self.used // ALIGNMENT) * ALIGNMENT + nbytes <= self.buffer.numel()

    def put(self, tensor: Tensor) -> Placed:
        """Copy a tensor in, strides kept. The caller has asked `fits`."""
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


def view(buffer: Tensor, placed: Placed) -> Tensor:
    """A placed tensor as a view of its arena. Raises Malformed when it does not lie inside."""
    end = placed.offset + placed.nbytes
    if end > buffer.numel() or placed.offset % ALIGNMENT or placed.nbytes % placed.dtype.itemsize:
        raise Malformed(f"bytes {placed.offset} to {end} of an arena of {buffer.numel()}")
    if not placed.nbytes:
        return torch.empty_strided(placed.shape, placed.strides, dtype=placed.dtype, device=buffer.device)
    flat = buffer[placed.offset : end].view(placed.dtype)
    return flat.as_strided(placed.shape, placed.strides)
