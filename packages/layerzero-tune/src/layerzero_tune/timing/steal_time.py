"""Time that the host of a virtual machine gave to others while something was measured.

A kernel of two threads waits for the one whose core was taken away, a kernel of one thread may not notice: of two that
are half as far again apart the slower one comes first. Linux counts such time in every guest (`steal` in /proc/stat),
for cores that had something to do. What was timed meanwhile is timed again a little later, and the calmest try counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LIMIT = 0.02  # a larger share of the time that was wanted is said, and what was timed is timed again
_LEAST = 5  # ticks of ten ms: one of them says nothing about a race of a moment
_PAUSES = (1.0, 3.0)  # before another try, by how long the one before took: whoever wants much leaves after a while
_LONGEST_S = 10.0


class Ticks(NamedTuple):
    """Of all cores together since the machine started: stolen, and wanted (worked or stolen)."""

    stolen: int
    wanted: int


def ticks(path: str = "/proc/stat") -> Ticks | None:
    """As the system counts them now; None where it does not."""
    try:
        with open(path, encoding="ascii") as file:
            name, *found = file.readline().split()
        user, nice, system, _, _, irq, softirq, stolen = (int(item) for item in found[:8])
    except (OSError, ValueError):
        return None
    return Ticks(stolen, user + nice + system + irq + softirq + stolen) if name == "cpu" else None


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
    kept, share, spent = _try(run, read)
    for pause in _PAUSES if patient else ():
        if share <= LIMIT:
            break
        wait(min(_LONGEST_S, pause * spent))
        found, less, spent = _try(run, read)
        if less < share:
            kept, share = found, less
    return kept, share


def _try(run: Callable[[], T], read: Callable[[], Ticks | None]) -> tuple[T, float, float]:
    """What it gives, the share that was stolen, and the seconds it took."""
    before, begin = read(), time.monotonic()
    found = run()
    return found, _share(before, read()), time.monotonic() - begin


def _share(before: Ticks | None, after: Ticks | None) -> float:
    if before is None or after is None:
        return 0.0
    stolen, wanted = after.stolen - before.stolen, after.wanted - before.wanted
    return stolen / wanted if stolen >= _LEAST and wanted > 0 else 0.0
