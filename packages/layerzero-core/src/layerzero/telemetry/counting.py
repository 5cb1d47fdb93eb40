"""Counting calls by kernel, for almost nothing: a hit already asks its entry's guard, and a counter can be that guard.

While counting is on, kernels are bound with a guard that counts: a bound method of `itertools.count`, which is C, takes
no lock, and is exact from any number of threads under the interpreter's lock. Switching counting on or off swaps the
World, so every kernel is bound anew; while it is off there is nothing to pay. Calls of a plan (`lz.plan`) and of a
compiled graph ask no guard and are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Guard = Callable[[], Any]


def counter_value(counter: Any) -> int:
    """What the next count would be; itertools offers no other way to look without counting."""
    return int(repr(counter)[len("count(") : -1])


class KernelCounters:
    """Calls by (op, kernel). One counter each, shared by every entry of that kernel, so that there are few."""

    def __init__(self) -> None:
        self._hits: dict[tuple[str, str], Any] = {}
        self._cold: dict[tuple[str, str], Any] = {}

    def guard(self, op: str, kernel_id: str, guard: Guard | None) -> Guard:
        """The guard to bind with: the given one first, so that only calls that pass are counted."""
        # From 1 on, since a guard must be true.
        count: Guard = self._hits.setdefault((op, kernel_id), itertools.count(1)).__next__
        if guard is None:
            return count
        return lambda: guard() and count()

    def cold(self, op: str, kernel_id: str) -> None:
        next(self._cold.setdefault((op, kernel_id), itertools.count()))

    def hits(self) -> dict[tuple[str, str], int]:
        return {key: counter_value(counter) - 1 for key, counter in list(self._hits.items())}

    def calls(self) -> dict[tuple[str, str], int]:
        found = self.hits()
        for key, counter in list(self._cold.items()):
            found[key] = found.get(key, 0) + counter_value(counter)
        return found
