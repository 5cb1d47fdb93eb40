"""The outcome of a selection, with its whole trace: what was chosen, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerzero.model.context import Context
from layerzero.reasons import Reason

__all__ = ["Bucket", "Candidate", "Decision", "ExecutionPlan", "Transform"]


@dataclass(frozen=True, slots=True)
class Transform:
    """One adaptation of the inputs before a kernel may run, with its estimated price."""

    name: str
    cost_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"name": self.name, "cost_us": round(self.cost_us, 3)}


@dataclass(frozen=True, slots=True)
class Candidate:
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

    @property
    def transform_cost_us(self) -> float:
        """Estimated price of all its transforms."""
        return sum(step.cost_us for step in self.transforms)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "kernel_id": self.kernel_id,
            "backend": self.backend,
            "accepted": self.accepted,
            "score": None if self.score is None else round(self.score, 4),
            "score_parts": {name: round(value, 4) for name, value in self.score_parts},
            "measured_us": self.measured_us,
            "reasons": [item.to_json() for item in self.reasons],
            "transforms": [step.to_json() for step in self.transforms],
            "transform_cost_us": round(self.transform_cost_us, 3),
            "flip": self.flip,
        }


@dataclass(frozen=True, slots=True)
class Bucket:
    """The range of one elastic size for which a decision holds (both ends included)."""

    name: str
    low: int
    high: int | None

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"name": self.name, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Decision:
    """What `select` returns. Candidates are in rank order: the chosen one first, rejected ones last."""

    op: str
    context: Context
    chosen: str
    candidates: tuple[Candidate, ...]
    is_fallback: bool = False
    locked: bool = False
    fused_ops: tuple[str, ...] = ()
    notes: tuple[Reason, ...] = ()
    fingerprint: str = ""
    policy_hash: str = ""
    buckets: tuple[Bucket, ...] = ()
    # Set when nothing may run; `chosen` is then empty.
    refusal: Reason | None = None

    @property
    def winner(self) -> Candidate:
        """The candidate that was chosen."""
        return self.candidate(self.chosen)

    def candidate(self, kernel_id: str) -> Candidate:
        """The verdict on one kernel."""
        return next(item for item in self.candidates if item.kernel_id == kernel_id)

    @property
    def transform_cost_total(self) -> float:
        """Estimated µs spent adapting inputs for the chosen kernel."""
        return self.winner.transform_cost_us if self.chosen else 0.0

    @property
    def ranking(self) -> tuple[str, ...]:
        """Accepted kernel ids, best first: the order of failover."""
        return tuple(item.kernel_id for item in self.candidates if item.accepted)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; the same shape as `lz.explain(...).to_json()` without `ran`."""
        return {
            "op": self.op,
            "chosen": self.chosen,
            "is_fallback": self.is_fallback,
            "locked": self.locked,
            "transform_cost_total": round(self.transform_cost_total, 3),
            "fused_ops": list(self.fused_ops),
            "buckets": [bucket.to_json() for bucket in self.buckets],
            "policy_hash": self.policy_hash,
            "fingerprint": self.fingerprint,
            "refusal": None if self.refusal is None else self.refusal.to_json(),
            "notes": [note.to_json() for note in self.notes],
            "candidates": [item.to_json() for item in self.candidates],
            "context": self.context.to_json(),
        }


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """What dispatch binds: the kernel, the transforms by name, and the decision behind them."""

    kernel_id: str
    transforms: list[str]
    debug_info: Decision

    @staticmethod
    def of(decision: Decision, kernel_id: str | None = None) -> ExecutionPlan:
        """The plan for the chosen kernel, or for another accepted candidate of the same decision."""
        item = decision.candidate(kernel_id or decision.chosen)
        return ExecutionPlan(item.kernel_id, [step.name for step in item.transforms], decision)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "kernel_id": self.kernel_id,
            "transforms": list(self.transforms),
            "debug_info": self.debug_info.to_json(),
        }
