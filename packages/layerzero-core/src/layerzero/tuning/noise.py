"""When two times are the same: a fixed band, widened by the spread that was measured, up to a limit; and what part of
a spread is the machine's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

__all__ = ["SURE", "alike", "evened", "median_error"]

SURE = 2.0  # standard errors
_MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean
_WIDEST = 0.05  # the band ends here, however unsteady the times are


def median_error(variance: float, samples: int) -> float:
    """Standard error of the median of so many samples."""
    return _MEDIAN_ERROR * math.sqrt(variance / samples)


def alike(best_us: float, best_error: float, us: float, error: float, noise: float) -> bool:
    """Whether a time is inside the noise band of the best one.

    The band is `noise`, or two standard errors of the difference where the times are less steady than that, but never
    more than five percent: a kernel that is further behind is not chosen for its name.
    """
    spread = SURE * math.hypot(best_error, error) / best_us
    return us <= best_us * (1.0 + max(noise, min(_WIDEST, spread)))


def evened(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The samples of each kernel without what the kernels have in common in a turn; all have one in every turn.

    When the machine slows down it does so for all of them. That would count as spread of each, and a kernel that is a
    tenth behind in every single turn could not be told from the first. Of two kernels, how they differ stays.
    """
    if len(found) < 2:
        return dict(found)
    usual = {name: statistics.median(turns) for name, turns in found.items()}
    turns = zip(*([us / usual[name] for us in taken] for name, taken in found.items()), strict=True)
    common = [statistics.median(shares) for shares in turns]
    return {name: [us / share for us, share in zip(taken, common, strict=True)] for name, taken in found.items()}
