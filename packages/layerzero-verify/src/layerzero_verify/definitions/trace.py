"""Workloads and traces: one line of JSON each, as flashinfer-bench reads and writes them; and outcomes of checks here.

A workload gives the variable axes of a definition and says where each input comes from. A trace adds who computed it
(`solution`, here a kernel id or a ground truth) and how that went.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero.json_form import Plain, plain
from layerzero.numerics import ErrorReport
from layerzero.reasons import Reason
from layerzero_verify.definitions.schema import at, parse_json, read_text, take, take_map
from layerzero_verify.report import finite


class Status(enum.StrEnum):
    """How an evaluation ended; the words are the format's. A skip is not among them: it leaves no trace."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"


@dataclass(frozen=True, slots=True)
class InputSource:
    """Where an input comes from: "random", "scalar" with its value, or "safetensors" with path and key."""

    kind: str = "random"
    value: int | float | bool | None = None
    path: str = ""
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.kind == "scalar":
            return {"type": "scalar", "value": self.value}
        return {"type": self.kind, **({"path": self.path, "tensor_key": self.key} if self.path else {})}


@dataclass(frozen=True)
class Workload(Plain):
    """One concrete case: sizes of the variable axes and the source of each input. Random data follows from the uuid."""

    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, InputSource] = field(default_factory=dict)


# Fields of an evaluation as they stand in the format's `correctness` and `performance`.
_ERRORS = ("max_relative_error", "max_absolute_error")
_TIMES = ("latency_ms", "reference_latency_ms")


@dataclass(frozen=True)
class Evaluation:
    """How a solution did. Errors are kept for PASSED and INCORRECT_NUMERICAL, times for PASSED: so the format rules."""

    status: Status
    hardware: str
    libs: Mapping[str, str]
    timestamp: str
    log: str = ""
    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    latency_ms: float = 0.0
    reference_latency_ms: float = 0.0

    @property
    def speedup_factor(self) -> float:
        """How much faster than the definition's own code; 0 where that was not run."""
        return self.reference_latency_ms / self.latency_ms if self.latency_ms > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        correctness = performance = None
        if self.status in (Status.PASSED, Status.INCORRECT_NUMERICAL):
            extra = {name: _number(value) for name, value in self.extra.items()} or None
            correctness = {**{name: _number(getattr(self, name)) for name in _ERRORS}, "extra": extra}
        if self.status is Status.PASSED:
            performance = {name: getattr(self, name) for name in (*_TIMES, "speedup_factor")}
        return {
            "status": self.status.value,
            "environment": {"hardware": self.hardware, "libs": dict(self.libs)},
            "timestamp": self.timestamp,
            "log": self.log,
            "correctness": correctness,
            "performance": performance,
        }


@dataclass(frozen=True)
class Trace(Plain):
    """A definition's workload, and what became of it. Without solution and evaluation it is a workload to be done."""

    definition: str
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None


def read_traces(path: Path) -> tuple[list[Trace], list[ConfigurationError]]:
    """Every good line of a workload or trace file, and what is wrong with the others."""
    good: list[Trace] = []
    bad: list[ConfigurationError] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        where = f"{path.name}, line {number}"
        try:
            if line.strip():
                good.append(parse_trace(parse_json(line, where), where))
        except ConfigurationError as error:
            bad.append(error)
    return good, bad


def append_traces(path: Path, traces: Iterable[Trace]) -> int:
    """Add lines at the end of a file in one write, so that two writers never mix their lines. Returns how many."""
    lines = [json.dumps(trace.to_json(), allow_nan=False) for trace in traces]
    if not lines:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with open(handle, "rb+", buffering=0) as out:
        if out.seek(0, os.SEEK_END) > 0:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":  # somebody's last line was left open
                lines[0] = "\n" + lines[0]
        out.write(("\n".join(lines) + "\n").encode())
    return len(lines)


def parse_trace(data: Any, where: str = "trace") -> Trace:
    """A Trace from its JSON."""
    solution = take(data, "solution", str, where, None)
    evaluation = take(data, "evaluation", dict, where, None)
    if (solution is None) != (evaluation is None):
        raise at(where, "solution and evaluation belong together")
    return Trace(
        take(data, "definition", str, where),
        _workload(take_map(data, "workload", where), f"{where}: workload"),
        solution,
        None if evaluation is None else _evaluation(evaluation, f"{where}: evaluation"),
    )


def _workload(data: Any, where: str) -> Workload:
    axes = take_map(data, "axes", where)
    for name in axes:
        if take(axes, name, int, f"{where}: axes") < 0:
            raise at(f"{where}: axes.{name}", f"{axes[name]} is negative", value=axes[name], limit="0 or more")
    inputs = {name: _source(item, f"{where}: inputs.{name}") for name, item in take_map(data, "inputs", where).items()}
    return Workload(take(data, "uuid", str, where), axes, inputs)


def _source(data: Any, where: str) -> InputSource:
    given = data if isinstance(data, dict) else {}
    plain = "scalar" if "value" in given else "safetensors" if "path" in given else "random"
    match take(data, "type", str, where, plain):
        case "random":
            return InputSource()
        case "scalar":
            return InputSource("scalar", take(data, "value", (int, float, bool), where))
        case "safetensors":
            return InputSource(
                "safetensors", None, take(data, "path", str, where), take(data, "tensor_key", str, where)
            )
        case other:
            raise at(f"{where}: type", f"{other!r} is unknown", value=other, limit="random, scalar or safetensors")


def _evaluation(data: Any, where: str) -> Evaluation:
    word = take(data, "status", str, where)
    if word not in Status.__members__:
        raise at(f"{where}: status", f"{word!r} is unknown", value=word, limit=", ".join(Status))
    environment = take(data, "environment", dict, where)
    correctness = take(data, "correctness", dict, where, None) or {}
    performance = take(data, "performance", dict, where, None) or {}
    return Evaluation(
        Status(word),
        take(environment, "hardware", str, where),
        {name: str(version) for name, version in take(environment, "libs", dict, where, {}).items()},
        take(data, "timestamp", str, where),
        take(data, "log", str, where, ""),
        extra=take(correctness, "extra", dict, where, {}),
        **{name: _float(correctness, name, where) for name in _ERRORS},
        **{name: _float(performance, name, where) for name in _TIMES},
    )


def _float(data: Any, name: str, where: str) -> float:
    """A number, or one of the words JSON has no number for."""
    found: Any = take(data, name, (int, float, str), where, 0.0)
    try:
        return float(found)
    except ValueError:
        raise at(f"{where}: {name}", f"{found!r} is no number", value=found) from None


def _number(value: Any) -> Any:
    """JSON has no infinity and no NaN; the format writes them as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


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
