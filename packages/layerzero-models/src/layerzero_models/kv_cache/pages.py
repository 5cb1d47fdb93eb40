"""Which pages belong to which sequence: allocation, sharing between forks, copy on write. Numbers only, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerzero.errors import invalid


class PageTable:
    """Pages of `batch` sequences out of a pool. `table` [batch, max pages] holds their numbers, unused places 0.

    A page may belong to several sequences after `fork`; before one of them writes to it, it gets a copy of its own.
    `version` counts changes, so that whoever keeps a copy on a device knows when it is old.
    """

    def __init__(self, batch: int, page_size: int, num_pages: int, max_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.table: Tensor = torch.zeros((batch, max_pages), dtype=torch.int32)
        self.version = 0
        self._owned: list[list[int]] = [[] for _ in range(batch)]
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages(self, seq: int) -> tuple[int, ...]:
        return tuple(self._owned[seq])

    def page(self, seq: int, number: int) -> int:
        return self._owned[seq][number]

    def grow(self, starts: Sequence[int], ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Make room for tokens `starts[s]` to `ends[s]` of each sequence, all or nothing. Raises KV_CACHE_FULL.

        The result names the pages to copy before anything is written, as (from, to).
        """
        shared = self._shared_pages(starts, ends)
        new = [max(0, self._count(end) - len(self._owned[seq])) for seq, end in enumerate(ends)]
        wanted = sum(new) + len(shared)
        if wanted > len(self._free):
            raise invalid("KV_CACHE_FULL", f"{wanted} new pages", f"{len(self._free)} of {self.num_pages} pages")
        copies = tuple(self._replace(seq, place) for seq, place in shared)
        for seq, count in enumerate(new):
            for _ in range(count):
                self._give(seq)
        self.version += bool(wanted)
        return copies

    def shrink(self, seq: int, length: int) -> None:
        """Give back the pages of a sequence beyond its first `length` tokens."""
        owned = self._owned[seq]
        while len(owned) > self._count(length):
            self._drop(owned.pop())
            self.table[seq, len(owned)] = 0
            self.version += 1

    def fork(self, source: int, target: int) -> None:
        """Let a sequence without pages share all pages of another."""
        for page in self._owned[source]:
            self._holders[page] += 1
        self._owned[target] = list(self._owned[source])
        self.table[target] = self.table[source]
        self.version += 1

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
            if start == end or place >= len(self._owned[seq]):
                continue
            page = self._owned[seq][place]
            holders = left.setdefault(page, self._holders[page])
            if holders > 1:
                found.append((seq, place))
                left[page] = holders - 1
        return found

    def _give(self, seq: int) -> None:
        page = self._free.pop()
        self._holders[page] = 1
        self.table[seq, len(self._owned[seq])] = page
        self._owned[seq].append(page)

    def _replace(self, seq: int, place: int) -> tuple[int, int]:
        old, page = self._owned[seq][place], self._free.pop()
        self._holders[page] = 1
        self._holders[old] -= 1
        self._owned[seq][place] = page
        self.table[seq, place] = page
        return old, page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
