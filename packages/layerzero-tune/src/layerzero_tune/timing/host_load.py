"""Whether other programs used the machine while something was timed.

Linux counts what every core did (/proc/stat) and what this process took of it; the rest was somebody else's: another
program, another container, or the host (see `stolen`). Only cores that this process may use are looked at. What was
timed on a busy machine is stored as such, and said: ratios of one race mostly hold, times by themselves do not.
"""

from __future__ import annotations

import os
from typing import NamedTuple

BUSY = 0.10  # a larger share of the cores used by others is said
_LEAST = 10  # ticks of ten ms: a few of them say nothing about a moment


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
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
        counts = [[int(item) for item in row[1:9]] for row in rows if row[0] in mine]
        if not counts or any(len(row) != 8 for row in counts):
            return None
        # user nice system idle iowait irq softirq steal
        worked = sum(sum(row) - row[3] - row[4] for row in counts)
        return Load(worked, sum(os.times()[:4]) * tick, sum(map(sum, counts)))
    except (AttributeError, OSError, ValueError):  # not on this system
        return None


def others(before: Load | None, after: Load | None) -> float:
    """What share of the cores others used between two looks; 0 where nobody counts."""
    if before is None or after is None or after.total <= before.total:
        return 0.0
    spent = (after.worked - before.worked) - (after.own - before.own)
    return min(1.0, spent / (after.total - before.total)) if spent >= _LEAST else 0.0
