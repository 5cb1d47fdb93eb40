"""Where a KV cache keeps its tokens: one buffer of full length, pages out of a pool, or chunks added as they fill.

Every strategy addresses a token as (chunk, block, slot): buffer number, row of the buffer, place in the row. A buffer
is [blocks, slots, heads, width] (NHD) or [blocks, heads, slots, width] (HND).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero_models.kv_cache.codec import Plane


class Spot(NamedTuple):
    """Places in one buffer, and which of the packed tokens go there; None: all of them."""

    buffer: int
    places: tuple[Tensor, Tensor]
    rows: Tensor | None


class Storage(abc.ABC):
    """Buffers of every layer and plane. `buffers[layer][plane]` lists them: one, or one for each chunk.

    A strategy is made with the options of `lz.kv_cache`, and the planes of a key and a value.
    """

    def __init__(self, options: Mapping[str, Any], planes: tuple[Plane, ...]) -> None:
        self.batch: int = options["batch"]
        self.heads: int = options["num_kv_heads"]
        self.layout: str = options["layout"]
        self.device: torch.device = options["device"]
        self.max_len: int | None = options["max_len"]
        self.version = 0  # changes whenever tokens may have moved
        self.planes = planes
        self.buffers: list[list[list[Tensor]]] = [[[] for _ in planes] for _ in range(options["layers"])]

    def add_buffers(self, blocks: int, slots: int) -> None:
        """One more buffer for every layer and plane; zeros, so that nothing unwritten is ever a NaN."""
        for layer in self.buffers:
            for plane, found in zip(self.planes, layer, strict=True):
                first, second = (slots, self.heads) if self.layout == "NHD" else (self.heads, slots)
                shape = (blocks, first, second, plane.width)
                found.append(torch.zeros(shape, dtype=plane.dtype, device=self.device))

    def tokens_first(self, buffer: Tensor) -> Tensor:
        """A buffer as [blocks, slots, heads, width], in a form that torch can index."""
        return indexable(buffer if self.layout == "NHD" else buffer.transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for layer in self.buffers for plane in layer for b in plane)

    # -- what strategies differ in ---------------------------------------------------------------
    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Make room for tokens starts[s] to ends[s] of each sequence, all or nothing. Raises KV_CACHE_FULL."""
        if self.max_len is not None and max(ends) > self.max_len:
            raise invalid("KV_CACHE_FULL", f"{max(ends)} tokens", f"{self.max_len} places of a sequence")

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
                rows = indexable(tokens)
                chosen = rows if spot.rows is None else rows.index_select(0, spot.rows)
                self.tokens_first(found[spot.buffer]).index_put_(spot.places, chosen)

    def read(self, layer: int, seq: int, length: int) -> tuple[Tensor, ...]:
        """The first `length` tokens of a sequence, [length, heads, width] for each plane; a copy."""
        out = []
        for plane, found in zip(self.planes, self.buffers[layer], strict=True):
            parts = self.pieces(found, seq, length)
            if not parts:
                parts = [torch.empty((0, self.heads, plane.width), dtype=plane.dtype, device=self.device)]
            out.append(torch.cat(parts).view(plane.dtype))
        return tuple(out)


def indexable(tensor: Tensor) -> Tensor:
    """The bytes of a dtype that torch cannot index; `view` of the dtype brings them back."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class Contiguous(Storage):
    """One buffer of full length: a block for each sequence. Room is there from the start, or never."""

    def __init__(self, options: Mapping[str, Any], planes: tuple[Plane, ...]) -> None:
        super().__init__(options, planes)
        self.add_buffers(self.batch, options["max_len"])

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        return 0, seq, position


class Paged(Storage):
    """A pool of pages that sequences take as they grow. `table` [batch, max pages] holds them, unused places 0.

    A page may belong to several sequences after `fork`; before one of them writes to it, it gets a copy of its own.
    """

    def __init__(self, options: Mapping[str, Any], planes: tuple[Plane, ...]) -> None:
        super().__init__(options, planes)
        self.page_size: int = options["page_size"]
        most = self._count(options["max_len"])
        self.num_pages: int = options["num_pages"] or self.batch * most
        self.table = torch.zeros((self.batch, most), dtype=torch.int32)
        self.owned: list[list[int]] = [[] for _ in range(self.batch)]
        self.free = list(range(self.num_pages - 1, -1, -1))
        self._holders = [0] * self.num_pages
        self.add_buffers(self.num_pages, self.page_size)

    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Take pages; shared ones that will be written to are copied first."""
        super().reserve(starts, ends)
        shared = self._shared_pages(starts, ends)
        new = [max(0, self._count(end) - len(owned)) for owned, end in zip(self.owned, ends, strict=True)]
        wanted = sum(new) + len(shared)
        if wanted > len(self.free):
            raise invalid("KV_CACHE_FULL", f"{wanted} new pages", f"{len(self.free)} of {self.num_pages} pages")
        before = [self.owned[seq][place] for seq, place in shared]
        copies = [self._take(seq, place) for seq, place in shared]
        for seq, count in enumerate(new):
            for _ in range(count):
                self._take(seq, len(self.owned[seq]))
        self.version += bool(wanted)
        if copies:
            source, target = (torch.tensor(pages, device=self.device) for pages in (before, copies))
            for page in before:
                self._holders[page] -= 1
            for layer in self.buffers:
                for (buffer,) in layer:
                    raw = indexable(buffer)
                    raw.index_copy_(0, target, raw.index_select(0, source))

    def release(self, seq: int, length: int) -> None:
        """Pages beyond the length go back to the pool."""
        owned = self.owned[seq]
        while len(owned) > self._count(length):
            page = owned.pop()
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self.free.append(page)
            self.table[seq, len(owned)] = 0
            self.version += 1

    def fork(self, source: int, target: int, length: int) -> None:
        """No token is copied before somebody writes."""
        for page in self.owned[source]:
            self._holders[page] += 1
        self.owned[target] = list(self.owned[source])
        self.table[target] = self.table[source]
        self.version += 1

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        number, slot = divmod(position, self.page_size)
        return 0, self.owned[seq][number], slot

    def pieces(self, buffers: Sequence[Tensor], seq: int, length: int) -> list[Tensor]:
        """The pages of the sequence, gathered."""
        pages = self.table[seq, : self._count(length)].to(self.device)
        return [self.tokens_first(buffers[0]).index_select(0, pages).flatten(0, 1)[:length]]

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shared_pages(self, starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
        """(sequence, place) of pages that would be written to while another sequence holds them too.

        Only the page an append begins in can be one: later ones are new. The last holder to write needs no copy.
        """
        found: list[tuple[int, int]] = []
        left: dict[int, int] = {}
        for seq, (start, end) in enumerate(zip(starts, ends, strict=True)):
            place = start // self.page_size
            if start == end or place >= len(self.owned[seq]):
                continue
            page = self.owned[seq][place]
            holders = left.setdefault(page, self._holders[page])
            if holders > 1:
                found.append((seq, place))
                left[page] = holders - 1
        return found

    def _take(self, seq: int, place: int) -> int:
        """A page out of the pool for this place of a sequence."""
        page = self.free.pop()
        self._holders[page] = 1
        self.owned[seq][place : place + 1] = [page]
        self.table[seq, place] = page
        return page


class Chunked(Storage):
    """Buffers of `chunk_size` tokens for every sequence, added when one of them grows past the last."""

    def __init__(self, options: Mapping[str, Any], planes: tuple[Plane, ...]) -> None:
        super().__init__(options, planes)
        self.chunk_size: int = options["chunk_size"]
        self._lengths = [0] * self.batch

    @property
    def chunks(self) -> int:
        return len(self.buffers[0][0])

    def reserve(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Add the chunks that are missing."""
        super().reserve(starts, ends)
        while self.chunks * self.chunk_size < max(ends):
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
        return min(max(length - number * self.chunk_size, 0), self.chunk_size)

    def place(self, seq: int, position: int) -> tuple[int, int, int]:
        chunk, slot = divmod(position, self.chunk_size)
        return chunk, seq, slot


STRATEGIES: dict[str, type[Storage]] = {"paged": Paged, "contiguous": Contiguous, "chunked": Chunked}
