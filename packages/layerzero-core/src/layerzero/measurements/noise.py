"""When two times are the same: a fixed band, widened by the spread that was measured, up to a limit.

A process that reads the performance database imports this with its first selection, so it imports next to nothing.
"""

from __future__ import annotations

import math

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
