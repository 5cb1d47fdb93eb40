"""What a CPU case is: contestants that do the same work, what they are measured against, and the goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "Case", "Goal"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Goal:
    """`lz` shall be at least `factor` times as fast as `against` ("eager"), or reach that share of the "floor"."""

    against: str
    factor: float


@dataclass(frozen=True)
class Case:
    """One line of the table. `make` gives the contestants by name.

    Always among them: "eager" (what a torch user writes) and "lz" (through the public function, call overhead
    included). Usual: "direct" (our kernel's adapter alone), "floor" (the same bytes, moved by the same threads and
    nothing else: `copied` or `read` of layerzero's own library), and any peer under its own name.
    """

    group: str
    name: str
    make: Callable[[], dict[str, Call]]
    goals: tuple[Goal, ...] = ()
