"""Counting calls by kernel, for almost nothing: a hit already asks its entry's guard, and a counter can be that guard.

While counting is on, kernels are bound with a guard that counts: a bound method of `itertools.count`, which is C, takes
no lock, and is exact from any number of threads under the interpreter's lock. Switching counting on or off swaps the
World, so every kernel is bound anew; while it is off there is nothing to pay. Calls of a plan (`lz.plan`) and of a
compiled graph ask no guard and are not counted.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import Any

from layerzero.forking import fresh_lock

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


class Histogram:
    """Counts of durations in fixed buckets, from 10 µs to 5 minutes."""

    BOUNDS = (
        1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        10.0, 30.0, 60.0, 300.0,
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self.reset()

    def reset(self) -> None:
        self._counts = [0] * (len(self.BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
            self._sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def read(self) -> tuple[list[int], float]:
        """Counts up to each bound and beyond the last, adding up; and the sum of all durations."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        for place in range(1, len(counts)):
            counts[place] += counts[place - 1]
        return counts, total

    def quantile(self, share: float) -> float | None:
        """The bound below which this share of the durations lies; None before the first."""
        counts, _ = self.read()
        if not counts[-1]:
            return None
        place = bisect.bisect_left(counts, share * counts[-1])
        return self.BOUNDS[place] if place < len(self.BOUNDS) else math.inf
