"""Who races: three samples of everyone, in turns; only whoever is far behind by the fastest of them is left out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from layerzero_tune.timing.clock import Clock

_HOPELESS = 4.0  # a kernel whose fastest sample takes so many times the best one's is not raced
_NEAR_US = 100.0  # but whoever is no further behind than this is: a late launch or an interruption is of that size
_SAMPLES = 3  # of everyone, before anyone is left out: one sample is at the mercy of one interruption
_TOGETHER = 5  # calls of such a sample, where they are short
_SHORT_US = 4_000.0


def screened(calls: Mapping[str, Callable[[], Any]], clock: Clock) -> dict[str, list[float]]:
    """Three samples of everyone, in turns, so that what disturbs one sample does not disturb all of a kernel's."""
    for step in calls.values():
        step()  # warm: the first call of a bound kernel may set up a workspace
    found = {name: [clock(step, 1)] for name, step in calls.items()}
    for _ in range(_SAMPLES - 1):
        for name, step in calls.items():
            # On a GPU the first launch after a pause is a late one; several in a row show the kernel.
            found[name].append(clock(step, _TOGETHER if found[name][0] < _SHORT_US else 1))
    return found


def pass_screening(samples: Mapping[str, list[float]]) -> list[str]:
    """Who may win: the fastest sample of each, against the middle one of the best. One sample that came late does not
    send its kernel away, one that met an idle machine for once does not send away the others."""
    best = min(statistics.median(found) for found in samples.values())
    return [name for name, found in samples.items() if min(found) <= max(_HOPELESS * best, best + _NEAR_US)]
