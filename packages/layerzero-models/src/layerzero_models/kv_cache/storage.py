"""Where a KV cache keeps its tokens: one buffer of full length, pages out of a pool, or chunks added as they fill.

Every strategy addresses a token as (chunk, block, slot): buffer number, row of the buffer, place in the row. A buffer
is [blocks, slots, heads, width] (NHD) or [blocks, heads, slots, width] (HND).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError, invalid
from layerzero_models.kv_cache.codec import Plane
from layerzero_models.kv_cache.pages import PageTable


class Frame(NamedTuple):
    """What every strategy is told."""

    batch: int
    heads: int
    layout: str
    layers: int
    planes: tuple[Plane, ...]
    device: torch.device


class Spot(NamedTuple):
    """Places in one buffer, and which of the packed tokens go there; None: all of them."""

    buffer: int
    places: tuple[Tensor, Tensor]
    rows: Tensor | None


class Storage(abc.ABC):
    """Buffers of every layer and plane. `buffers[layer][plane]` lists them: one, or one for each chunk."""

    name = ""

    def __init__(self, frame: Frame) -> None:
        self.batch = frame.batch
        self.heads = frame.heads
        self.layout = frame.layout
        self.planes = frame.planes
        self.device = frame.device
        self.buffers: list[list[list[Tensor]]] = [[[] for _ in frame.planes] for _ in range(frame.layers)]

    def add_buffers(self, blocks: int, slots: int) -> None:
        """One more buffer for every layer and plane; zeros, so that nothing unwritten is ever a NaN."""
        for layer in self.buffers:
            for plane, found in zip(self.planes, layer, strict=True):
                first, second = (slots, self.heads) if self.layout == "NHD" else (self.heads, slots)
                shape = (blocks, first, second, plane.width)
                found.append(torch.zeros(shape, dtype=plane.dtype, device=self.device))

    def tokens_first(self, buffer: Tensor) -> Tensor:
        """A buffer as [blocks, slots, heads, width], bytes for the dtypes that torch cannot index."""
        view = buffer if self.layout == "NHD" else buffer.transpose(1, 2)
        return view.view(torch.uint8) if view.dtype.itemsize == 1 else view

    @property
    def version(self) -> int:
        """Changes whenever tokens may have moved."""
        return 0

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for layer in self.buffers for plane in layer for b in plane)

    # -- what strategies differ in ---------------------------------------------------------------
    @abc.abstractmethod
    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Make room for tokens starts[s] to ends[s] of each sequence, all or nothing. Raises KV_CACHE_FULL."""

    def release(self, seq: int, length: int) -> None:  # noqa: B027 - a strategy need not give room back
        """Nothing beyond the first `length` tokens of a sequence is needed any more."""

    def fork(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of one sequence those of another, which is empty."""
        for layer in self.buffers:
            for plane in layer:
                for number, buffer in enumerate(plane):
                    view, used = self.tokens_first(buffer), self.used(number, length)
                    view[target, :used].copy_(view[source, :used])

    def used(self, number: int, length: int) -> int:
        """How many slots of a buffer the first `length` tokens of a sequence take."""
        return length

    @abc.abstractmethod
    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        """Chunk, block and slot of a token."""

    def pieces(self, buffers: Sequence[Tensor], seq: int, length: int) -> list[Tensor]:
        """The first `length` tokens of a sequence in the buffers of one plane, in order, [n, heads, width] each."""
        return [self.tokens_first(each)[seq, : self.used(number, length)] for number, each in enumerate(buffers)]

    # -- tokens ----------------------------------------------------------------------------------
    def locate(self, starts: Sequence[int], counts: Sequence[int]) -> list[Spot]:
        """Where counts[s] tokens of each sequence go, packed, the first of them at position starts[s]."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        row = 0
        for seq, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for position in range(start, start + count):
                chunk, block, slot = self.place(seq, position)
                found.setdefault(chunk, []).append((block, slot, row))
                row += 1
        spots = []
        for chunk, entries in found.items():
            blocks, slots, rows = torch.tensor(entries).t().contiguous().to(self.device)
            spots.append(Spot(chunk, (blocks, slots), None if len(found) == 1 else rows))
        return spots

    def write(self, layer: int, planes: Sequence[Tensor], spots: Sequence[Spot]) -> None:
        """Write packed tokens [T, heads, width], one tensor for each plane, to where `locate` said."""
        for spot in spots:
            for found, tokens in zip(self.buffers[layer], planes, strict=True):
                rows = tokens.view(torch.uint8) if tokens.dtype.itemsize == 1 else tokens
                chosen = rows if spot.rows is None else rows.index_select(0, spot.rows)
                self.tokens_first(found[spot.buffer]).index_put_(spot.places, chosen)

    def read(self, layer: int, seq: int, length: int) -> tuple[Tensor, ...]:
        """The first `length` tokens of a sequence, [length, heads, width] for each plane; a copy."""
        out = []
        for plane, found in zip(self.planes, self.buffers[layer], strict=True):
            parts = self.pieces(found, seq, length)
            if not parts:
                parts = [torch.empty((0, self.heads, plane.width), dtype=plane.dtype, device=self.device)]
            merged = torch.cat(parts)
            out.append(merged.view(plane.dtype) if plane.dtype.itemsize == 1 else merged)
        return tuple(out)


def _too_long(ends: Sequence[int], limit: int) -> InvalidInputError:
    return invalid("KV_CACHE_FULL", f"{max(ends)} tokens", f"{limit} places of a sequence")


class Contiguous(Storage):
    """One buffer of full length: a block for each sequence."""

    name = "contiguous"

    def __init__(self, frame: Frame, max_len: int) -> None:
        super().__init__(frame)
        self.max_len = max_len
        self.add_buffers(self.batch, max_len)

    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Room is there from the start, or never."""
        if max(ends, default=0) > self.max_len:
            raise _too_long(ends, self.max_len)

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        """The sequence is the block, the position the slot."""
        return 0, seq, position


class Paged(Storage):
    """A pool of pages that sequences take as they grow and share after a fork."""

    name = "paged"

    def __init__(self, frame: Frame, max_len: int, page_size: int, num_pages: int) -> None:
        super().__init__(frame)
        self.max_len = max_len
        self.table = PageTable(self.batch, page_size, num_pages, -(-max_len // page_size))
        self.add_buffers(num_pages, page_size)

    @property
    def version(self) -> int:
        return self.table.version

    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Take pages; shared ones that will be written to are copied first."""
        if max(ends, default=0) > self.max_len:
            raise _too_long(ends, self.max_len)
        copies = self.table.grow(starts, ends)
        if copies:
            source, target = (torch.tensor(side, device=self.device) for side in zip(*copies, strict=True))
            for layer in self.buffers:
                for (buffer,) in layer:
                    raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
                    raw.index_copy_(0, target, raw.index_select(0, source))

    def release(self, seq: int, length: int) -> None:
        """Pages beyond the length go back to the pool."""
        self.table.shrink(seq, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """No token is copied before somebody writes."""
        self.table.fork(source, target)

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        number, slot = divmod(position, self.table.page_size)
        return 0, self.table.page(seq, number), slot

    def pieces(self, buffers: Sequence[Tensor], seq: int, length: int) -> list[Tensor]:
        """The pages of the sequence, gathered."""
        pages = self.table.table[seq, : -(-length // self.table.page_size)].to(self.device)
        return [self.tokens_first(buffers[0]).index_select(0, pages).flatten(0, 1)[:length]]


class Chunked(Storage):
    """Buffers of `chunk_size` tokens for every sequence, added when one of them grows past the last."""

    name = "chunked"

    def __init__(self, frame: Frame, max_len: int | None, chunk_size: int) -> None:
        super().__init__(frame)
        self.chunk_size = chunk_size
        self.max_len = max_len
        self._lengths = [0] * self.batch

    @property
    def chunks(self) -> int:
        return len(self.buffers[0][0])

    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Add the chunks that are missing."""
        if self.max_len is not None and max(ends, default=0) > self.max_len:
            raise _too_long(ends, self.max_len)
        while self.chunks * self.chunk_size < max(ends, default=0):
            self.add_buffers(self.batch, self.chunk_size)
        self._lengths = [max(old, new) for old, new in zip(self._lengths, ends, strict=True)]

    def release(self, seq: int, length: int) -> None:
        """Chunks that no sequence reaches are dropped."""
        self._lengths[seq] = length
        needed = -(-max(self._lengths) // self.chunk_size)
        for layer in self.buffers:
            for plane in layer:
                del plane[needed:]

    def fork(self, source: int, target: int, length: int) -> None:
        super().fork(source, target, length)
        self._lengths[target] = length

    def used(self, number: int, length: int) -> int:
        """A full chunk, the rest, or nothing."""
        return min(max(length - number * self.chunk_size, 0), self.chunk_size)

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        """The sequence is the block; chunk and slot follow from the position."""
        chunk, slot = divmod(position, self.chunk_size)
        return chunk, seq, slot
