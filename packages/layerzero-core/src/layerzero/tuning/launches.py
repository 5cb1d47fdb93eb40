"""What a launch costs the host, where it is more than the device can hide.

The clock for a GPU overwrites the cache before each call, and during those sixty µs the host runs ahead: a kernel of
four µs whose launch takes fifty seems to take four. In a model run eagerly the device is rarely that far behind; there
the launch is what is waited for. So the part of a launch beyond what is usually hidden counts as time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from layerzero.tuning.clock import Clock, launch_clock
from layerzero.tuning.race import Times

__all__ = ["HIDDEN_US", "with_launches"]

HIDDEN_US = 30.0  # so far ahead of the device the host of an eager model usually is
_LONG_US = 200.0  # a kernel of this length hides any launch
_QUEUED = 10  # calls in a row: the queue of a device takes many more
_TURNS = 3  # the fastest counts, since the host is interrupted now and then


def with_launches(
    times: Mapping[str, Times], calls: Mapping[str, Callable[[], Any]], clock: Clock = launch_clock
) -> dict[str, Times]:
    """The times, where a launch takes more than a kernel and what is hidden of it: that of the launch."""
    return {name: _with_launch(found, calls[name], clock) for name, found in times.items()}


def _with_launch(found: Times, call: Callable[[], Any], clock: Clock) -> Times:
    if found.median_us >= _LONG_US:
        return found
    exposed = min(clock(call, _QUEUED) for _ in range(_TURNS)) - HIDDEN_US
    if exposed <= found.median_us:
        return found
    more = exposed - found.median_us
    return replace(
        found, median_us=exposed, p95_us=found.p95_us + more, p99_us=found.p99_us + more,
    )  # fmt: skip
