"""The outcome of a selection, with its whole trace: what was chosen, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final

from layerzero.json_form import Plain
from layerzero.model.context import Context
from layerzero.reasons import Reason

# What a kernel's place in a ranking rests on, the strongest first.
MEASURED: Final = "measured here"
SHIPPED: Final = "shipped measurements"
ROOFLINE: Final = "roofline estimate"
PRIORITY: Final = "priority"


@dataclass(frozen=True, slots=True)
class Expectation(Plain):
    """What somebody else's measurements say of one kernel and one call.

    ratio     its time over that of the code a torch user would write
    base_us   what that code is expected to take, in µs
    source    SHIPPED, between measured sizes; ROOFLINE, from bytes, operations and the rates the kernel reached
    machine   the device that was measured, with commit and torch
    nearest   the nearest measured sizes, and how many octaves away they are
    noise     ratios that are closer than this say nothing: more where the machine was busy
    """

    ratio: float
    base_us: float
    source: str
    machine: str
    commit: str
    torch: str
    nearest: tuple[tuple[str, int], ...]
    octaves: float
    noise: float

    def to_json(self) -> dict[str, Any]:
        figures = {name: round(getattr(self, name), 4) for name in ("ratio", "base_us", "octaves")}
        return Plain.to_json(self) | figures | {"nearest": dict(self.nearest)}

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.nearest)
        where = f"{self.machine}, commit {brief(self.commit)}, torch {self.torch}"
        return (
            f"{self.source}: {self.ratio:.2f} x torch's time; nearest {sizes}, {self.octaves:.1f} octaves away; {where}"
        )


def brief(commits: str) -> str:
    """The first of the commits that measurements were taken at, and how many more there are."""
    first, *more = re.sub(r" \([^)]*\)", "", commits).split(", ")
    return f"{first[:7]} and {len(more)} more" if more else first[:7]


@dataclass(frozen=True, slots=True)
class Transform:
    """One adaptation of the inputs before a kernel may run, with its estimated price."""

    name: str
    cost_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "cost_us": round(self.cost_us, 3)}


@dataclass(frozen=True, slots=True)
class Candidate(Plain):
    """One kernel's verdict: accepted with a score, or rejected with reasons."""

    kernel_id: str
    backend: str
    accepted: bool
    score: float | None = None
    measured_us: float | None = None
    reasons: tuple[Reason, ...] = ()
    transforms: tuple[Transform, ...] = ()
    score_parts: tuple[tuple[str, float], ...] = ()
    flip: str = ""
    # By what the kernel is proven for such calls: a kit, a check here, a measurement. Empty: by nothing, or not asked.
    proof: str = ""
    # Estimated bytes besides inputs and result: scratch of the kernel, copies of adapted inputs.
    memory: tuple[int, int] = (0, 0)
    # Greater than 0: the policy prefers it, and the greater comes first whatever the scores.
    preferred: int = 0
    # What measurements of other machines say of it, where nothing was measured here.
    expected: Expectation | None = None
    _unshown: ClassVar = ("preferred",)  # the order of the candidates says it

    @property
    def source(self) -> str:
        """What its place rests on: a measurement here, shipped measurements, a roofline estimate, its priority."""
        if self.measured_us is not None:
            return MEASURED
        return PRIORITY if self.expected is None else self.expected.source

    @property
    def speed(self) -> str:
        """Its time in words: measured here, or expected by what others measured; empty where nobody did."""
        if self.measured_us is not None:
            return f"{self.measured_us:.1f} µs measured"
        return "" if self.expected is None else f"{self.expected.ratio:.2f} × torch's time expected"

    @property
    def outdone(self) -> str:
        """Of a kernel that fits and was not chosen: why the other was; empty for the chosen one."""
        return "scored lower" if " points behind" in self.flip else self.flip.partition(":")[0]

    @property
    def transform_cost_us(self) -> float:
        return sum(step.cost_us for step in self.transforms)

    def to_json(self) -> dict[str, Any]:
        return Plain.to_json(self) | {
            "score": None if self.score is None else round(self.score, 4),
            "score_parts": {name: round(value, 4) for name, value in self.score_parts},
            "source": self.source,
            "transform_cost_us": round(self.transform_cost_us, 3),
            "memory": {"workspace": self.memory[0], "temporaries": self.memory[1], "total": sum(self.memory)},
        }


@dataclass(frozen=True, slots=True)
class Bucket(Plain):
    """The range of one growing size for which a decision holds (both ends included)."""

    name: str
    low: int
    high: int | None


class Trace(Sequence[Candidate]):
    """Candidates that are written out when somebody first looks at them.

    A decision needs the ranking at once but its words only when it is explained; both come from the same values.
    """

    def __init__(self, write: Callable[[], tuple[Candidate, ...]]) -> None:
        self._all = cache(write)

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


@dataclass(frozen=True, slots=True)
class Decision(Plain):
    """What `select` returns. Candidates are in rank order: the chosen one first, rejected ones last.

    `steps` holds the accepted kernels in rank order with their transforms: what dispatch needs, at once.
    """

    op: str
    context: Context
    chosen: str
    candidates: Sequence[Candidate]
    steps: tuple[tuple[str, tuple[Transform, ...]], ...] = ()
    is_fallback: bool = False
    locked: bool = False
    fused_ops: tuple[str, ...] = ()
    notes: tuple[Reason, ...] = ()
    fingerprint: str = ""
    policy_hash: str = ""
    buckets: tuple[Bucket, ...] = ()
    # Kernels that would have come before the chosen one, were they compiled; dispatch has them compiled.
    pending: tuple[str, ...] = ()
    # Canaries that would have come before the chosen one: dispatch runs the first in shadow, now and then.
    shadow: tuple[str, ...] = ()
    # Set when nothing may run; `chosen` is then empty.
    refusal: Reason | None = None
    _unshown: ClassVar = ("steps",)

    @property
    def winner(self) -> Candidate:
        return self.candidate(self.chosen)

    def candidate(self, kernel_id: str) -> Candidate:
        return next(item for item in self.candidates if item.kernel_id == kernel_id)

    def transforms(self, kernel_id: str) -> tuple[Transform, ...]:
        return next(steps for name, steps in self.steps if name == kernel_id)

    @property
    def transform_cost_total(self) -> float:
        return sum(step.cost_us for step in self.transforms(self.chosen)) if self.chosen else 0.0

    @property
    def ranking(self) -> tuple[str, ...]:
        """Accepted kernel ids, best first: the order of failover."""
        return tuple(name for name, _ in self.steps)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; the same shape as `lz.explain(...).to_json()` without `ran`."""
        found = Plain.to_json(self)
        longest = {name: found.pop(name) for name in ("candidates", "context")}  # last, for people
        ranked_by = self.winner.source if self.chosen else None
        cost = round(self.transform_cost_total, 3)
        return {**found, "ranked_by": ranked_by, "transform_cost_total": cost, **longest}


@dataclass(frozen=True, slots=True)
class ExecutionPlan(Plain):
    """What dispatch binds: the kernel, the transforms by name, and the decision behind them."""

    kernel_id: str
    transforms: list[str]
    debug_info: Decision

    @staticmethod
    def of(decision: Decision, kernel_id: str | None = None) -> ExecutionPlan:
        """The plan for the chosen kernel, or for another accepted candidate of the same decision."""
        chosen = kernel_id or decision.chosen
        return ExecutionPlan(chosen, [step.name for step in decision.transforms(chosen)], decision)
