"""What a launch costs the host, where it is more than the kernel takes.

The clock for a GPU overwrites the cache before each call, and during those sixty µs the host runs ahead: a kernel of
four µs whose launch takes fifty seems to take four. In a model run eagerly, short kernels follow one another and the
device waits for the host: there a call takes its launch or its kernel, whichever is longer. A captured graph has no
launches and is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from layerzero.tuning.clock import Clock, launch_clock
from layerzero.tuning.race import Times

__all__ = ["with_launch", "with_launches"]

_LONG_US = 200.0  # a kernel of this length hides any launch
_QUEUED = 10  # calls in a row: the queue of a device takes many more
_TURNS = 7  # in turns with the others; the fastest counts, since the host is interrupted now and then


def with_launches(
    times: Mapping[str, Times], calls: Mapping[str, Callable[[], Any]], clock: Clock = launch_clock
) -> dict[str, Times]:
    """The times; of a kernel that is shorter than its launch, that of the launch."""
    short = [name for name, found in times.items() if found.median_us < _LONG_US]
    launches = {name: float("inf") for name in short}
    for _ in range(_TURNS):
        for name in short:
            launches[name] = min(launches[name], clock(calls[name], _QUEUED))
    return {name: _charged(found, launches.get(name, 0.0)) for name, found in times.items()}


def with_launch(us: float, call: Callable[[], Any], clock: Clock | None = None) -> float:
    """What one kernel takes; where it is shorter than its launch, what that takes."""
    if us >= _LONG_US:
        return us
    clock = launch_clock if clock is None else clock
    return max(us, min(clock(call, _QUEUED) for _ in range(_TURNS)))


def _charged(found: Times, launch_us: float) -> Times:
    more = launch_us - found.median_us
    if more <= 0.0:
        return found
    return replace(found, median_us=launch_us, p95_us=found.p95_us + more, p99_us=found.p99_us + more)
