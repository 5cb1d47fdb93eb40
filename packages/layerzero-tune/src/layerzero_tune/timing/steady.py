"""Whether a machine kept its speed while something was measured, told without counters or rights.

A fixed piece of work is timed before and after: the quickest of several tries, since whatever interrupts only adds.
On a shared host some cores are slow for seconds: where what the host does is part of a time, it is taken on the core
that is quickest at the moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MOVED = 0.10  # a change of speed by more than a tenth is said
_MOST_CORES = 32  # are tried: a millisecond each
_TRIES = 9
_STEPS = 3_000


@dataclass(frozen=True, slots=True)
class Pace:
    """ns of the fixed work before and after a measurement."""

    before_ns: int
    after_ns: int

    @property
    def change(self) -> float:
        """How much longer the work took afterwards: 0.2 is a fifth longer, negative is quicker."""
        return self.after_ns / self.before_ns - 1.0

    @property
    def steady(self) -> bool:
        """Whether the speed stayed within a tenth."""
        return max(self.before_ns, self.after_ns) <= (1.0 + MOVED) * min(self.before_ns, self.after_ns)

    def to_json(self) -> dict[str, Any]:
        return {"before_ns": self.before_ns, "after_ns": self.after_ns, "steady": self.steady}


def pace() -> int:
    """ns of the fixed work, now; about two milliseconds in all."""
    return max(1, min(_once() for _ in range(_TRIES)))


def quick_pace() -> int:
    """The same from three tries, for use between short measurements; under a millisecond."""
    return max(1, min(_once() for _ in range(3)))


@contextmanager
def quick_core(now: Callable[[], int] | None = None) -> Iterator[int | None]:
    """Run this thread on the core that does the fixed work quickest now; None where a thread cannot choose.

    Threads that are started inside would stay on that core: whatever starts some has to have run before.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except (AttributeError, OSError):  # not on this system
        yield None
        return
    chosen = None
    try:
        if len(allowed) > 1:
            chosen = _quickest(sorted(allowed), quick_pace if now is None else now)
        yield chosen
    finally:
        if chosen is not None:
            os.sched_setaffinity(0, allowed)


def _quickest(cores: list[int], now: Callable[[], int]) -> int | None:
    """Move this thread to the quickest of some cores; None, and it stays, where it may not move."""
    step = -(-len(cores) // _MOST_CORES)
    found: dict[int, int] = {}
    try:
        for core in cores[::step]:
            os.sched_setaffinity(0, {core})
            found[core] = now()
        best = min(found, key=lambda core: found[core])
        os.sched_setaffinity(0, {best})
    except OSError:
        if found:
            os.sched_setaffinity(0, set(cores))
        return None
    return best


def _once() -> int:
    begin = time.perf_counter_ns()
    value = 1
    for _ in range(_STEPS):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return time.perf_counter_ns() - begin
