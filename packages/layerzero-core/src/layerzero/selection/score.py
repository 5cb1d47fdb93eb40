"""Scores: priority + policy bonus + measured speed - price of transforms.

priority     what the backend's author expects of such a call, 0 to 100; measured kernels all start from the highest,
             and where there are any, one without a measurement stays below the slowest of them
bonus        prefer, avoid and boosts of the policy; beyond its points a preferred kernel comes before all others
measured     max(-30, -10 * (t / fastest - 1)) for kernels with a measurement; inside the noise band of the
             fastest it is 0, and the tie breaks by kernel id, reference kernels last. A measurement already holds
             its transforms.
transforms   one point per two estimated µs, at most 30, for kernels without a measurement
"""

from __future__ import annotations

from layerzero.model.decision import Transform

__all__ = ["UNMEASURED_STEP", "measured_part", "rank", "score", "tie"]

UNMEASURED_STEP = 0.01
"""So far below the slowest measured kernel an unmeasured one stands, whatever it says of itself."""

_WORST_MEASURED = -30.0
_MEASURED_WEIGHT = 10.0
_POINTS_PER_US = 0.5
_WORST_TRANSFORM = 30.0
_REFERENCE = "reference."


def score(
    priority: float,
    bonus: float,
    measured_us: float | None,
    fastest_us: float | None,
    transforms: tuple[Transform, ...],
    noise: float,
) -> tuple[float, tuple[tuple[str, float], ...]]:
    """The score of one accepted kernel, and the parts it is the sum of."""
    measured, price = 0.0, 0.0
    if measured_us is not None and fastest_us:
        measured = measured_part(measured_us, fastest_us, noise)
    elif transforms:
        price = min(_WORST_TRANSFORM, _POINTS_PER_US * sum(step.cost_us for step in transforms))
    parts = (("priority", priority), ("policy", bonus), ("measured", measured), ("transforms", -price))
    return priority + bonus + measured - price, parts


def measured_part(measured_us: float, fastest_us: float | None, noise: float) -> float:
    """What a measured time adds to a score."""
    ratio = measured_us / fastest_us - 1.0 if fastest_us else 0.0
    return 0.0 if ratio <= noise else max(_WORST_MEASURED, -_MEASURED_WEIGHT * ratio)


def rank(total: float, kernel_id: str, preferred: int = 0) -> tuple[int, float, bool, str]:
    """Sort key: what the policy prefers first, then the best score, equal scores by `tie`."""
    return (-preferred, -round(total, 6), *tie(kernel_id))


def tie(kernel_id: str) -> tuple[bool, str]:
    """Sort key of kernels that are equally good: by kernel id, those that others are held against last."""
    return (kernel_id.startswith(_REFERENCE), kernel_id)
