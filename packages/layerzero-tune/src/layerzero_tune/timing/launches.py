"""What a launch costs the host, where it is more than the kernel takes.

The clock for a GPU overwrites the cache before each call, and during those sixty µs the host runs ahead: a kernel of
four µs whose launch takes fifty seems to take four. In a model run eagerly, short kernels follow one another and the
device waits for the host: there a call takes its launch or its kernel, whichever is longer. A captured graph has no
launches and is timed by itself.

A shared host is at times twice as slow as a moment before, and the device is not. So launches are timed on the core
that is quickest at the moment, beside a fixed piece of work, and a launch counts as long as it takes when the host is
as quick as it has been in this process; what a turn has in common for all kernels is taken out of it. A kernel is
called once before, and nobody always comes first: what ran before leaves the host's caches full, a third of a short
launch. Those that come out close are timed again among themselves, in several looks, three percent apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from layerzero.runtime.current import collector_paused
from layerzero_tune.timing.clock import Clock, launch_clock
from layerzero_tune.timing.host_load import pace, quick_core
from layerzero_tune.timing.race import Times, without_common_mode

_LONG_US = 200.0  # a kernel of this length hides any launch
_QUEUED = 10  # calls in a row: the queue of a device takes many more
_TURNS = 15  # of a look, in turns with the others; the middle one counts, since the host is interrupted now and then
LAUNCH_LOOKS = 4  # at those that are close
SAME = 0.06  # by so much two launches differ from one process to the next, without a reason in either
_CLOSE = 0.15  # so near the quickest launch, a kernel is timed once more beside those that are as near
_SOONER = 0.02  # of such launches the one counts whose kernel is done sooner, by more than this
_LATER = 0.02  # how far behind the others are written down: out of the noise band, also after selection has weighed it

Pacer = Callable[[], float]
"""How many times longer than at its quickest the host takes for the same work, now."""


_quickest_ns = math.inf


def host_pace() -> float:
    """The host's pace against the quickest of this process."""
    global _quickest_ns
    now = pace(3)
    _quickest_ns = min(now, _quickest_ns)
    return now / _quickest_ns


def with_launches(
    times: Mapping[str, Times],
    calls: Mapping[str, Callable[[], Any]],
    clock: Clock = launch_clock,
    pacer: Pacer | None = None,
    *,
    same: float = 0.0,
    looks: int = LAUNCH_LOOKS,
    together: Collection[str] = (),
    each_turn: Callable[[], None] | None = None,
) -> dict[str, Times]:
    """The times; of a kernel that is shorter than its launch, that of the launch.

    Launches no further than `same` behind the quickest of those that count are the same, and among them the device
    decides, whose times do not depend on the process. Those that are close have so many `looks` more, and those,
    `together`, that are held against each other. `each_turn` is called before every turn, untimed.
    """
    short = {name: calls[name] for name, found in times.items() if found.median_us < _LONG_US}
    launches = _launches(short, clock, pacer or host_pace, each_turn)
    quickest = min((found.median_us for found in launches.values()), default=0.0)
    close = [name for name, us in launches.items() if name in together or us.median_us <= quickest * (1.0 + _CLOSE)]
    if len(close) > 1 and looks:
        launches |= _launches({name: calls[name] for name in close}, clock, pacer or host_pace, each_turn, looks)
    told = {name: _charged(found, launches[name]) if name in launches else found for name, found in times.items()}
    charged = [name for name in launches if told[name] is not times[name]]
    best = min((told[name].median_us for name in charged), default=0.0)
    alike = [name for name in charged if told[name].median_us <= best * (1.0 + same)] if same else []
    soonest = min((times[name].median_us for name in alike), default=0.0)
    for name in alike:
        device = times[name]
        later = device.median_us > soonest * (1.0 + _SOONER)
        # What decided here is the device: its spread counts, not that of the launches, which would undo the decision.
        steady = device.steady * (best / device.median_us) ** 2
        told[name] = replace(
            told[name], median_us=best * (1.0 + _LATER) if later else best, steady=steady, samples=device.samples
        )
    return told


def with_launch(us: float, call: Callable[[], Any], clock: Clock | None = None, pacer: Pacer | None = None) -> float:
    """What one kernel takes; where it is shorter than its launch, what that takes."""
    if us >= _LONG_US:
        return us
    found = _launches({"": call}, launch_clock if clock is None else clock, pacer or host_pace, looks=2)[""]
    return max(us, found.median_us)


def _launches(
    calls: Mapping[str, Callable[[], Any]], clock: Clock, pacer: Pacer, each_turn: Callable[[], None] | None = None,
    looks: int = 1,
) -> dict[str, Times]:  # fmt: skip
    """µs of each launch at the host's quickest pace."""
    if not calls:
        return {}
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with collector_paused():
        for look in range(looks):
            with quick_core():
                before = pacer()
                for number in range(look * _TURNS, (look + 1) * _TURNS):
                    if each_turn is not None:
                        each_turn()
                    turn = {}
                    # Another one begins at each turn, and every other turn goes backwards.
                    order = [*names[number % len(names) :], *names[: number % len(names)]]
                    for name in order[::-1] if number % 2 else order:
                        calls[name]()
                        turn[name] = clock(calls[name], _QUEUED)
                    after = pacer()
                    for name, us in turn.items():
                        found[name].append(us * 2.0 / (before + after))
                    before = after
    return {name: Times.of(turns) for name, turns in without_common_mode(found).items()}


def _charged(found: Times, launch: Times) -> Times:
    """The time of the launch, with its spread, where that is the longer one."""
    more = launch.median_us - found.median_us
    if more <= 0.0:
        return found
    return replace(
        found, median_us=launch.median_us, p95_us=max(launch.p95_us, found.p95_us + more),
        p99_us=max(launch.p99_us, found.p99_us + more),
        variance=max(found.variance, launch.variance), steady=max(found.steady, launch.steady), samples=launch.samples,
    )  # fmt: skip
