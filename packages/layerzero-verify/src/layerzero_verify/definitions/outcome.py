"""What checking a definition found: one Outcome for each solution and workload, and the report over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from layerzero.json_form import plain
from layerzero.numerics import ErrorReport
from layerzero.reasons import Reason
from layerzero_verify.definitions.trace import Evaluation, Status, Trace, Workload
from layerzero_verify.report import finite

# The solution name of a definition's own code.
REFERENCE = "reference"
_METRICS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")


@dataclass(frozen=True, slots=True)
class Options:
    """How to check.

    backends   kernel ids or backends to try; empty means every kernel of the op
    device     "cuda", "cpu", …; None takes the GPU where there is one, else the CPU
    trust      paths whose definitions may run their code, besides those of the environment
    truths     whether ground truths are looked for
    repeats    how often a solution is run for its time
    """

    backends: tuple[str, ...] = ()
    device: str | None = None
    trust: tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    truths: bool = True
    repeats: int = 3


@dataclass(frozen=True)
class Outcome:
    """One solution on one workload: passed, failed in one of the format's ways, or skipped (status None, a reason)."""

    definition: str
    workload: Workload
    solution: str
    against: str = ""
    status: Status | None = None
    reason: Reason | None = None
    log: str = ""
    errors: Mapping[str, ErrorReport] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    latency_ms: float = 0.0
    reference_latency_ms: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    @property
    def skipped(self) -> bool:
        """Whether nothing was tried; `reason` says why."""
        return self.status is None

    @property
    def failed(self) -> bool:
        return not self.passed and not self.skipped

    def trace(self, hardware: str, libs: Mapping[str, str], timestamp: str) -> Trace:
        """As a line for flashinfer-bench; a skip has none."""
        assert self.status is not None, "a skipped check leaves no trace"
        worst_abs, worst_rel = (
            max((getattr(report, name) for report in self.errors.values()), default=float(self.extra.get(name, 0.0)))
            for name in ("max_abs", "max_rel")
        )
        evaluation = Evaluation(
            self.status,
            hardware,
            libs,
            timestamp,
            self.log,
            worst_rel,
            worst_abs,
            {"compared_with": self.against, **self.metrics()},
            self.latency_ms,
            self.reference_latency_ms,
        )
        return Trace(self.definition, self.workload, self.solution, evaluation)

    def metrics(self) -> dict[str, Any]:
        """The numbers of each output: errors, cosine, mse, hit ratio, and the worst places."""
        found = {name: value for name, value in self.extra.items() if name not in ("max_abs", "max_rel")}
        for output, report in self.errors.items():
            found[output] = {name: finite(getattr(report, name)) for name in _METRICS}
            found[output]["worst"] = [
                finite({"index": list(spot.index), "actual": spot.actual, "expected": spot.expected})
                for spot in report.worst
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        shown = ("definition", "workload", "solution", "against", "reason", "log", "latency_ms", "reference_latency_ms")
        return {
            **{name: plain(getattr(self, name)) for name in shown},
            "status": "SKIPPED" if self.status is None else self.status.value,
            "metrics": self.metrics(),
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """How the checks of one source went."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        tried = self.passed + self.failed
        return f"{self.passed}/{tried} passed" + (f", {self.skipped} skipped" if self.skipped else "")


@dataclass(frozen=True)
class Report:
    """Every outcome, what was left out, which files could not be read, and what was looked for and not found."""

    outcomes: tuple[Outcome, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    device: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing failed. Skips are no failure, but a report of skips alone shows nothing: see `counts`."""
        return not any(outcome.failed for outcome in self.outcomes) and not self.problems

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.failed)

    def counts(self) -> dict[str, Counts]:
        """Passed, failed and skipped by source: a kernel, a ground truth, a pair of truths, a definition's code."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            source = f"{outcome.solution} against {outcome.against}" if outcome.against else outcome.solution
            found.setdefault(source, []).append(outcome)
        words = ("passed", "failed", "skipped")
        return {
            source: Counts(*(sum(getattr(outcome, word) for outcome in found[source]) for word in words))
            for source in sorted(found)
        }

    def to_json(self) -> dict[str, Any]:
        shown = {item.name: plain(getattr(self, item.name)) for item in fields(self)}
        return {"ok": self.ok, **shown, "counts": {source: asdict(count) for source, count in self.counts().items()}}
