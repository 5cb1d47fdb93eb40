"""Counts of durations. Alone in its file: the cold path imports it, and must import little."""

from __future__ import annotations

import bisect
import math

from layerzero.forking import fresh_lock


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
