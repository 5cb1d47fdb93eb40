"""What a run of the ladder found, as values: checks, levels, the verdict, the report; and what failures point to."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from layerzero.json_form import Plain, plain
from layerzero.numerics import ErrorLocation, ErrorReport
from layerzero_verify.thresholds import BUG, FAR_WORSE

if TYPE_CHECKING:
    from layerzero_verify.lineup import Target


SCHEMA_VERSION = 1  # of the JSON, as every `lz … --json` has it

LEVELS = dict(enumerate(("preflight", "kernels", "layer", "stages", "model", "training")))


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class StageDiff(Plain):
    """One stage of a layer or model against the truth, and the kernel that computed it."""

    stage: str
    op: str
    kernel: str
    max_abs: float
    threshold: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. A failed one names level, op, kernel, stage and the first element that differs.

    `used` is the share of its bounds that was used up, `served` are all kernels that took part where several did.
    """

    level: int
    name: str
    status: Status
    op: str = ""
    kernel: str = ""
    stage: str = ""
    subject: str = ""
    dtype: str = ""
    max_abs: float | None = None
    mean_abs: float | None = None
    threshold: float | None = None
    used: float | None = None
    first: ErrorLocation | None = None
    component: str = ""
    detail: str = ""
    flags: tuple[str, ...] = ()
    stages: tuple[StageDiff, ...] = ()
    figures: tuple[tuple[str, float], ...] = ()
    served: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; fields without a value are left out."""
        words = {"first": "first_difference", "flags": "red_flags"}
        found = {words.get(item.name, item.name): getattr(self, item.name) for item in fields(self)}
        found["figures"] = dict(self.figures)
        given = {name: value for name, value in found.items() if value not in ("", None, (), {})}
        shown: dict[str, Any] = finite(plain(given))
        return shown

    def __str__(self) -> str:
        """One line: what, where, and the first element that differs."""
        where = " ".join(part for part in (self.op, self.kernel, self.stage) if part)
        parts = [f"level {self.level} {self.name}", where, " ".join(x for x in (self.subject, self.dtype) if x)]
        if self.first is not None:
            spot = self.first
            parts.append(f"first at {list(spot.index)}: got {spot.actual:.6g}, want {spot.expected:.6g}")
        if self.max_abs is not None and self.threshold is not None:
            parts.append(f"max {self.max_abs:.2e} (limit {self.threshold:.0e})")
        if self.component:
            parts.append(f"component: {self.component}")
        parts += [self.detail, *self.flags]
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Level:
    """One rung: its checks, and why it was left out where it was."""

    number: int
    checks: tuple[Check, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return LEVELS[self.number]

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(item for item in self.checks if item.status is Status.FAIL)

    @property
    def passed(self) -> int:
        return sum(item.status is Status.OK for item in self.checks)

    @property
    def status(self) -> Status:
        """Fail if any check failed; skip where nothing was compared."""
        if self.failures:
            return Status.FAIL
        return Status.OK if self.passed else Status.SKIP

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.number,
            **{name: plain(getattr(self, name)) for name in ("name", "status", "passed", "checks")},
            "failed": len(self.failures),
            "skipped": sum(item.status is Status.SKIP for item in self.checks),
            "reason": self.skipped,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Verdict(Plain):
    """The pyramid rule applied: the lowest rung that fails, and what that means."""

    ok: bool
    kind: str  # pass, contract, kernel, layer, integration, training
    level: int | None
    text: str
    component: str = ""
    op: str = ""
    kernel: str = ""
    stage: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A whole run."""

    lane: str
    target: str
    device: str
    dtype: str
    seed: int
    kernels: tuple[str, ...]
    absent: tuple[tuple[str, str], ...]
    levels: tuple[Level, ...]
    verdict: Verdict
    seconds: float
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(item for level in self.levels for item in level.failures)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; docs/verify.md describes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            **{item.name: plain(getattr(self, item.name)) for item in fields(self)},
            "seconds": round(self.seconds, 2),
            "versions": dict(self.versions),
            "absent": [{"kernel": name, "why": why} for name, why in self.absent],
        }


def finite(value: Any) -> Any:
    """A JSON value with NaN and infinities as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


class StageError(Exception):
    """An op raised at a stage."""

    def __init__(self, stage: str, op: str, kernel: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.where = {"op": op, "kernel": kernel, "stage": stage}


def of_error(level: int, name: str, report: ErrorReport, **where: Any) -> Check:
    """A check from a comparison of tensors."""
    details = [where.pop("detail", "")]
    if not report.shape_ok:
        details.append(f"shape {list(report.shape)}, expected {list(report.expected_shape)}")
    elif not report.nan_agree or not report.inf_agree:
        count = report.nan_mismatches + report.inf_mismatches
        details.append(f"NaN or infinity in different places: {count} elements")
    return Check(
        level,
        name,
        Status.OK if report.ok else Status.FAIL,
        max_abs=report.max_abs,
        mean_abs=report.mean_abs,
        threshold=max(report.tolerance.atol, report.tolerance.rtol),
        used=report.used,
        first=None if report.ok else report.first,
        detail="" if report.ok else "; ".join(filter(None, details)),
        **where,
    )


def failed(level: int, name: str, error: BaseException | str, **where: Any) -> Check:
    """A check that could not be made because something raised; at which op and stage, where that is known."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if isinstance(error, StageError):
        text, where = str(error), {**error.where, **where}
    elif isinstance(error, BaseException) and error.__cause__ is not None:
        text += f" (from {type(error.__cause__).__name__}: {error.__cause__})"
    return Check(level, name, Status.FAIL, detail=" ".join(text.split())[:500], **where)


def skipped(level: int, name: str, why: str, **where: Any) -> Check:
    """A check that was left out, and why."""
    return Check(level, name, Status.SKIP, detail=why, **where)


# -- the pyramid rule: where the lowest fault lies, and what it means that everything below it is sound ---------
def judge(levels: Sequence[Level], target: Target) -> Verdict:
    """The verdict on a run: the first failure of the lowest failing level speaks for all above it."""
    if not target.kernels:
        why = f" ({target.absent[0][1]})" if target.absent else ""
        return Verdict(False, "nothing", None, f"nothing was verified: no kernel of {target.name} can run here{why}")
    broken = next((level for level in levels if level.failures), None)
    passed = [level for level in levels if level.status is Status.OK]
    if broken is None:
        count = sum(level.passed for level in levels)
        left = [f"level {level.number} ({level.skipped})" for level in levels if level.skipped]
        text = f"{target.name}: all {count} checks pass at levels {_numbers(passed)}"
        return Verdict(True, "pass", None, text + (f"; left out: {'; '.join(left)}" if left else ""))
    # Of several failures the one that shows a wrong number says more than one that only raised.
    first = next((item for item in broken.failures if item.first is not None), broken.failures[0])
    below = [level for level in passed if 0 < level.number < broken.number]
    # The rule needs its premise: without the lower levels nobody knows whether the kernels are sound.
    placed = any(level.number == 1 for level in below)
    kind = {0: "contract", 1: "kernel"}.get(broken.number, "integration" if placed else "unplaced")
    return Verdict(
        False,
        kind,
        broken.number,
        f"{_headline(broken.number, kind, first)}. {_meaning(broken.number, below, levels)}",
        component=first.component or first.op,
        op=first.op,
        kernel=first.kernel,
        stage=first.stage,
    )


def _headline(number: int, kind: str, first: Check) -> str:
    component = f"{first.component}, " if first.component and first.component != first.op else ""
    word = "fault" if kind == "unplaced" else f"{kind} fault"
    where = " ".join(part for part in (first.op, first.kernel) if part) or first.name
    place = f" at {first.stage}" if first.stage else ""
    return f"{word} at level {number} ({LEVELS[number]}): {component}{where}{place}"


def _meaning(number: int, below: list[Level], levels: Sequence[Level]) -> str:
    if number == 0:
        return "The declaration and the kernel do not fit together, so nothing heavy was run"
    if number == 1:
        above = [level for level in levels if level.number > 1 and level.status is not Status.SKIP]
        more = f"; levels {_numbers(above)} were run without it" if above else ""
        return f"The kernel alone gives another result than the reference{more}"
    if below:
        return (
            f"Levels {_numbers(below)} pass: the parts are right by their own measure, "
            "what joins them (a convention, a layout, an alignment) is not"
        )
    return "The levels below were not run; run them to see whether a kernel or the integration is at fault"


def _numbers(levels: Sequence[Level]) -> str:
    return ", ".join(str(level.number) for level in levels)


# -- the stages of a transformer layer, and the component that the stages that differ point to -------------------
# stage -> (op that computes it, component it belongs to, stage whose op takes it in), in the order of a layer
_TABLE = {
    "embedding": ("embedding", "embedding", ""),
    "ln1_out": ("rms_norm", "norm", "q_proj"),
    "q_proj": ("linear", "QKV projection", "q_rope"),
    "k_proj": ("linear", "QKV projection", "q_rope"),
    "v_proj": ("linear", "QKV projection", "attn_out"),
    "q_rope": ("rope", "RoPE", "attn_out"),
    "k_rope": ("rope", "RoPE", "attn_out"),
    "scores": ("attention", "attention", ""),
    "attn_out": ("attention", "attention", "proj_out"),
    "proj_out": ("linear", "output projection", "ln2_out"),
    "residual": ("add_rms_norm", "residual add", "output"),
    "ln2_out": ("add_rms_norm", "norm", "fc1_out"),
    "fc1_out": ("linear", "MLP", "swiglu_out"),
    "swiglu_out": ("silu_and_mul", "MLP", "mlp_out"),
    "mlp_out": ("linear", "MLP", "output"),
    "output": ("", "residual add", ""),
    "norm": ("rms_norm", "norm", ""),
    "head": ("linear", "output head", ""),
    "logits": ("linear", "output head", ""),
}
STAGES = tuple(_TABLE)
OPS = {stage: op for stage, (op, _, _) in _TABLE.items()}
# a gradient that is wrong at a stage was made by the op that takes the stage in
CONSUMERS = {"input": "ln1_out", **{stage: taker for stage, (_, _, taker) in _TABLE.items() if taker}}

_RULES = {
    "RoPE": "q or k diverge after the rotation and were right before it: RoPE, its convention or its tables",
    "attention": "q, k and v are right, the scores or the attention output are not: the attention kernel",
    "output projection": "the attention output is right, its projection is not: the output projection",
    "QKV projection": "the normed input is right, its projection is not: the query, key or value projection",
    "norm": "the norm's input is right, its output is not: the norm",
    "MLP": "the second norm is right, the MLP is not: the gated MLP",
    "residual add": "attention and MLP are right, their sum is not: the residual add",
    "embedding": "the first tensor of the model differs: the embedding",
    "output head": "the layers are right, the logits are not: the final norm or the output head",
}


def bare(stage: str) -> str:
    """A stage's own name: "layer 1 q_rope" gives "q_rope"."""
    return stage.rpartition(" ")[2]


def localise(stages: Sequence[StageDiff]) -> dict[str, Any]:
    """Fields of a check of stages: the first that differs decides whom to blame; nothing when all agree.

    Stages come in the order they were computed.
    """
    wrong = next((item for item in stages if not item.ok), None)
    if wrong is None:
        return {}
    component = _TABLE.get(bare(wrong.stage), ("", "unknown component"))[1]
    return {
        "op": wrong.op,
        "kernel": wrong.kernel,
        "stage": wrong.stage,
        "component": component,
        "detail": _RULES.get(component, ""),
        "stages": tuple(stages),
        "flags": red_flags(stages),
    }


def red_flags(stages: Sequence[StageDiff]) -> tuple[str, ...]:
    """What no rounding explains: a difference above 1.0, or one stage far worse than the others."""
    found = [
        f"{item.stage} differs by {item.max_abs:.3g}: above {BUG:g} is a bug, not rounding"
        for item in stages
        if not item.ok and not item.max_abs <= BUG
    ][:1]
    measured = [item.max_abs for item in stages if item.max_abs > 0.0]
    if len(measured) >= 4 and not all(item.ok for item in stages):
        worst = max(stages, key=lambda item: item.max_abs)
        if worst.max_abs > FAR_WORSE * median(measured):
            found.append(f"{worst.stage} is far worse than the other stages: look there")
    return tuple(found)
