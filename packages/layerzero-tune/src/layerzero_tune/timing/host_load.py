"""What a machine did beside what was timed: worked for other programs, served other guests, changed its speed.

Linux counts what every core did (/proc/stat) and what this process took of it; the rest was somebody else's: another
program or another container. Only cores that this process may use are looked at. What was timed on a busy machine is
stored as such, and said: ratios of one race mostly hold, times by themselves do not.

Of the time that the host of a virtual machine gave to others Linux counts what was wanted here (`steal`). A kernel of
two threads waits for the one whose core was taken away, a kernel of one thread may not notice: of two that are half as
far again apart the slower one comes first. What was timed meanwhile is timed again, and the calmest try counts.

The speed itself is told by a fixed piece of work, the quickest of several tries, since whatever interrupts only adds.
On a shared host some cores are slow for seconds: where what the host does is part of a time, it is taken on the core
that is quickest at the moment.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

BUSY = 0.10  # a larger share of the cores used by others is said
_LEAST = 10  # ticks of ten ms: a few of them say nothing about a moment
LIMIT = 0.02  # a larger share of the time that was wanted is said, and what was timed is timed again
_LEAST_STOLEN = 5  # ticks of ten ms: one of them says nothing about a race of a moment
_PAUSES = (1.0, 3.0)  # before another try, by how long the one before took: whoever wants much leaves after a while
_LONGEST_S = 10.0
MOVED = 0.10  # a change of speed by more than a tenth is said
_MOST_CORES = 32  # are tried: a millisecond each
_STEPS = 3_000


class Load(NamedTuple):
    """Ticks since the machine started, of the cores of this process: by all, by this process, and in all."""

    worked: int
    own: float
    total: int


def load(path: str = "/proc/stat") -> Load | None:
    """As the system counts now; None where it does not."""
    try:
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
        counts = [row for name, row in _counts(path).items() if name in mine]
        if not counts or any(len(row) != 8 for row in counts):
            return None
        worked = sum(sum(row) - row[3] - row[4] for row in counts)
        return Load(worked, sum(os.times()[:4]) * tick, sum(map(sum, counts)))
    except (AttributeError, OSError, ValueError):  # not on this system
        return None


def _counts(path: str) -> dict[str, list[int]]:
    """Of each core, and of all ("cpu"), the ticks of: user nice system idle iowait irq softirq steal."""
    with open(path, encoding="ascii") as file:
        rows = [line.split() for line in file if line.startswith("cpu")]
    return {name: [int(item) for item in found[:8]] for name, *found in rows}


def others(before: Load | None, after: Load | None) -> float:
    """What share of the cores others used between two looks; 0 where nobody counts."""
    if before is None or after is None or after.total <= before.total:
        return 0.0
    spent = (after.worked - before.worked) - (after.own - before.own)
    return min(1.0, spent / (after.total - before.total)) if spent >= _LEAST else 0.0


class Ticks(NamedTuple):
    """Of all cores together since the machine started: stolen, and wanted (worked or stolen)."""

    stolen: int
    wanted: int


def ticks(path: str = "/proc/stat") -> Ticks | None:
    """As the system counts them now; None where it does not."""
    try:
        user, nice, system, _, _, irq, softirq, stolen = _counts(path)["cpu"]
    except (OSError, ValueError, KeyError):
        return None
    return Ticks(stolen, user + nice + system + irq + softirq + stolen)


def with_little_steal(
    run: Callable[[], T],
    read: Callable[[], Ticks | None] | None = None,
    wait: Callable[[float], None] = time.sleep,
    *,
    patient: bool = True,
) -> tuple[T, float]:
    """What `run` gives, and what share of the time it wanted went to others; up to three tries until that is small, or
    the first one where nobody is `patient`."""
    read = read or ticks
    tries: list[tuple[T, float]] = []
    spent = 0.0
    for pause in (0.0, *_PAUSES) if patient else (0.0,):
        if pause:
            wait(min(_LONGEST_S, pause * spent))
        before, begin = read(), time.monotonic()
        found, after, share = run(), read(), 0.0
        spent = time.monotonic() - begin
        if before is not None and after is not None:
            stolen, wanted = after.stolen - before.stolen, after.wanted - before.wanted
            share = stolen / wanted if stolen >= _LEAST_STOLEN and wanted > 0 else 0.0
        tries.append((found, share))
        if share <= LIMIT:
            break
    return min(tries, key=lambda tried: tried[1])


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
        return max(self.before_ns, self.after_ns) <= (1.0 + MOVED) * min(self.before_ns, self.after_ns)

    def to_json(self) -> dict[str, Any]:
        return {"before_ns": self.before_ns, "after_ns": self.after_ns, "steady": self.steady}


def pace(tries: int = 9) -> int:
    """ns of the fixed work now. Nine tries take two milliseconds or so; three, for between short calls, under one."""
    return max(1, min(_once() for _ in range(tries)))


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
            chosen = _quickest(sorted(allowed), now or functools.partial(pace, 3))
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
