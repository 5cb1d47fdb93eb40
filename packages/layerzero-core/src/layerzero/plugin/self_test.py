"""Known answers: the usual body of `layerzero_health`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from layerzero.model.status import HealthReport

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["known_answers"]


def known_answers(
    backend: str, what: str, answers: Callable[[], Iterable[tuple[Tensor, Tensor]]], limit: float
) -> HealthReport:
    """Whether all pairs of what was found and what is known differ by less than `limit`; an exception is a failure."""
    try:
        errors = [float((found.double() - wanted.double()).abs().max()) for found, wanted in answers()]
    except Exception as error:
        return HealthReport(backend, False, f"{type(error).__name__}: {error}"[:400])
    worst = math.nan if any(map(math.isnan, errors)) else max(errors)
    return HealthReport(backend, worst < limit, f"{what}, error {worst:.1e}", worst)
