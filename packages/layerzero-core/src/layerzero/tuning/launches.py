"""What a launch costs the host, where it is more than the kernel takes.

The clock for a GPU overwrites the cache before each call, and during those sixty µs the host runs ahead: a kernel of
four µs whose launch takes fifty seems to take four. In a model run eagerly, short kernels follow one another and the
device waits for the host: there a call takes its launch or its kernel, whichever is longer. A captured graph has no
launches and is timed by itself.

A shared host is at times twice as slow as a moment before, and the device is not: a kernel would win or lose by when
its turn came. So a fixed piece of work is timed beside each turn, and a launch counts as long as it takes when the host
is as quick as it has been in this process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from layerzero.tuning.clock import Clock, launch_clock
from layerzero.tuning.race import Times
from layerzero.tuning.steady import quick_pace

__all__ = ["with_launch", "with_launches"]

_LONG_US = 200.0  # a kernel of this length hides any launch
_QUEUED = 10  # calls in a row: the queue of a device takes many more
_TURNS = 9  # in turns with the others; the middle one counts, since the host is interrupted now and then

Pacer = Callable[[], float]
"""How many times longer than at its quickest the host takes for the same work, now."""


class _Quickest:
    """The host's pace against the quickest of this process."""

    def __init__(self) -> None:
        self._ns = 0

    def __call__(self) -> float:
        now = quick_pace()
        self._ns = min(now, self._ns or now)
        return now / self._ns


host_pace: Pacer = _Quickest()


def with_launches(
    times: Mapping[str, Times],
    calls: Mapping[str, Callable[[], Any]],
    clock: Clock = launch_clock,
    pacer: Pacer | None = None,
) -> dict[str, Times]:
    """The times; of a kernel that is shorter than its launch, that of the launch."""
    short = {name: calls[name] for name, found in times.items() if found.median_us < _LONG_US}
    launches = _launches(short, clock, pacer or host_pace)
    return {name: _charged(found, launches.get(name, 0.0)) for name, found in times.items()}


def with_launch(us: float, call: Callable[[], Any], clock: Clock | None = None, pacer: Pacer | None = None) -> float:
    """What one kernel takes; where it is shorter than its launch, what that takes."""
    if us >= _LONG_US:
        return us
    return max(us, _launches({"": call}, launch_clock if clock is None else clock, pacer or host_pace)[""])


def _launches(calls: Mapping[str, Callable[[], Any]], clock: Clock, pacer: Pacer) -> dict[str, float]:
    """µs of each launch at the host's quickest pace, the middle of some turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    before = pacer() if calls else 1.0
    for _ in range(_TURNS):
        turn = {name: clock(call, _QUEUED) for name, call in calls.items()}
        after = pacer() if calls else 1.0
        for name, us in turn.items():
            found[name].append(us * 2.0 / (before + after))
        before = after
    return {name: statistics.median(turns) for name, turns in found.items()}


def _charged(found: Times, launch_us: float) -> Times:
    more = launch_us - found.median_us
    if more <= 0.0:
        return found
    return replace(found, median_us=launch_us, p95_us=found.p95_us + more, p99_us=found.p99_us + more)
