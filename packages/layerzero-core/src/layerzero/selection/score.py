"""Scores: priority + policy bonus + measured speed - price of transforms.

priority     what the backend's author expects of such a call, 0 to 100; measured kernels all start from the highest,
             and where there are any, one without a measurement stays below the slowest of them
bonus        prefer, avoid and boosts of the policy; beyond its points a preferred kernel comes before all others
measured     max(-30, -10 * (t / fastest - 1)) for kernels with a measurement; inside the noise band of the
             fastest it is 0, and the tie breaks by kernel id, reference kernels last. A measurement already holds
             its transforms.
transforms   one point per two estimated µs, at most 30, for kernels without a measurement
expected     in place of `measured` where nothing was measured here and measurements of other machines speak: the same
             points for expected times, transforms included. Priorities then break ties, and place kernels of which
             those measurements know nothing (`by_expectation`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layerzero.model.decision import Transform

UNMEASURED_STEP = 0.01
"""So far below the slowest measured kernel an unmeasured one stands, whatever it says of itself."""

_WORST_MEASURED = -30.0
_MEASURED_WEIGHT = 10.0
_POINTS_PER_US = 0.5
_WORST_TRANSFORM = 30.0
_REFERENCE = "reference."
_TORCH = frozenset({"torch", "sdpa"})  # backends made of what a torch user would write
_FASTER = 0.1  # faster than torch by more than this, or by more than expectations err
_TIE = 1e-4  # of a point for each point of priority, among kernels that are expected to be equally fast


def score(
    priority: float,
    bonus: float,
    measured_us: float | None,
    fastest_us: float | None,
    transforms: tuple[Transform, ...],
    noise: float,
    expected: float | None = None,
) -> tuple[float, tuple[tuple[str, float], ...]]:
    """The score of one accepted kernel, and the parts it is the sum of; `expected` are points for an expected time."""
    measured, price = expected or 0.0, 0.0
    if measured_us is not None and fastest_us:
        measured = measured_part(measured_us, fastest_us, noise)
    elif transforms:
        price = min(_WORST_TRANSFORM, _POINTS_PER_US * sum(step.cost_us for step in transforms))
    word = "measured" if expected is None else "expected"
    parts = (("priority", priority), ("policy", bonus), (word, measured), ("transforms", -price))
    return priority + bonus + measured - price, parts


def measured_part(measured_us: float, fastest_us: float | None, noise: float) -> float:
    """What a measured time adds to a score."""
    ratio = measured_us / fastest_us - 1.0 if fastest_us else 0.0
    return 0.0 if ratio <= noise else max(_WORST_MEASURED, -_MEASURED_WEIGHT * ratio)


class Expected(NamedTuple):
    """A kernel that fits: what its author expects, in points, and its expected time over torch's; None: not known."""

    kernel_id: str
    backend: str
    prior: float
    ratio: float | None


def by_expectation(kernels: Sequence[Expected], noise: float) -> dict[str, tuple[float, float]]:
    """Points for priority and for the expected time, by kernel id. Empty where nothing is expected of any kernel.

    Times inside the noise of the fastest are the same, and priorities decide. A kernel of which nothing is known stands
    above torch's code where its author expects that of it and no kernel of its backend is known, but below all that are
    expected to be clearly faster than torch; otherwise below torch's code, by as many points as its priority says.
    Where nothing is known of torch's code either, its best kernel counts as long as itself.
    """
    ratios = {item.kernel_id: item.ratio for item in kernels if item.ratio is not None}
    if not ratios:
        return {}
    told = {item.backend for item in kernels if item.ratio is not None}
    torchs = [item for item in kernels if item.backend in _TORCH]
    if torchs and not any(item.kernel_id in ratios for item in torchs):
        ratios[min(torchs, key=lambda item: (-item.prior, item.kernel_id)).kernel_id] = 1.0
    level, fastest = max(item.prior for item in kernels), min(ratios.values())
    points = {name: measured_part(ratio, fastest, noise) for name, ratio in ratios.items()}
    known = [item for item in torchs if item.kernel_id in ratios]
    own = max((item.prior for item in known), default=0.0)
    base = min((ratios[item.kernel_id] for item in known), default=1.0)
    at_torch = level + measured_part(base, fastest, noise)
    faster = [level + points[name] for name, ratio in ratios.items() if ratio * (1.0 + max(noise, _FASTER)) <= 1.0]
    found = {}
    for item in kernels:
        if item.kernel_id in points:
            found[item.kernel_id] = (level + _TIE * item.prior, points[item.kernel_id])
        elif item.prior > own and item.backend not in told:
            above = min([at_torch + 2 * UNMEASURED_STEP, *(place - UNMEASURED_STEP for place in faster)])
            found[item.kernel_id] = (above + _TIE * item.prior, 0.0)
        else:
            found[item.kernel_id] = (at_torch - UNMEASURED_STEP - max(0.0, own - item.prior), 0.0)
    return found


def rank(total: float, kernel_id: str, preferred: int = 0) -> tuple[int, float, bool, str]:
    """Sort key: what the policy prefers first, then the best score, equal scores by `tie`."""
    return (-preferred, -round(total, 6), *tie(kernel_id))


def tie(kernel_id: str) -> tuple[bool, str]:
    """Sort key of kernels that are equally good: by kernel id, those that others are held against last."""
    return (kernel_id.startswith(_REFERENCE), kernel_id)
