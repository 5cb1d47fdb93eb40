"""The stations of the tour, what it found at each, and the words for it that the terminal and the page share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from layerzero.json_form import Plain, plain
from layerzero.model.decision import Candidate
from layerzero.model.device import DeviceSpec
from layerzero_cli.output import STYLES, Block, Cell, Line, Table
from layerzero_tune.demo.block import Sizes

_SAME = 0.05
_HEAD = ("step", "kernel that ran", "LayerZero", "torch", "vs torch", "check")
_CLEARLY = 1.2  # less than this between two kernels may be the noise of a short measurement
_SLOWER = (
    "Slower steps: a call pays some microseconds for its lookup, which shows in small ops; "
    "and where only the plain reference runs, a backend package may bring a faster kernel (lz doctor)."
)
_NEXT = "Next: lz doctor, lz list, lz explain attention --shape 1,32,128,64 --dtype bfloat16 --device h100"


@dataclass(frozen=True, slots=True)
class Station(Plain):
    """One op of the block, as a newcomer should meet it."""

    key: str
    op: str
    title: str
    group: str
    lesson: str


GROUPS = {"in": "Tokens in", "attention": "Attention", "mlp": "MLP", "out": "Token out", "decode": "Decode, one token"}

_data = json.loads(files("layerzero_tune.demo").joinpath("stations.json").read_text(encoding="utf-8"))
# In the order in which `forward` calls the ops of a prefill; of a decode step only what it does differently.
PREFILL, DECODE = (tuple(Station(*row) for row in _data[part]) for part in ("prefill", "decode"))


@dataclass(frozen=True, slots=True)
class Check(Plain):
    """A result held against the reference. `detail` says how, `max_error` how far off it was."""

    ok: bool
    max_error: float
    detail: str

    @property
    def word(self) -> str:
        """The outcome in a word."""
        if not self.ok:
            return f"WRONG, {self.max_error:.0e}"
        return "ok, exact" if self.max_error == 0 else f"ok, {self.max_error:.0e}"


@dataclass(frozen=True, slots=True)
class Stop(Plain):
    """What was found at a station.

    `chosen` is the decision, `ran` what dispatch noted when it ran: they differ after a failover. `others_us` times
    the accepted kernels that were not chosen, `plan_us` the same call pre-bound by `lz.plan`; `torch_us` is the same
    step in plain torch.
    """

    station: Station
    shape: str
    chosen: str
    ran: str | None
    candidates: tuple[Candidate, ...]
    check: Check
    lz_us: float
    torch_us: float
    others_us: dict[str, float] = field(default_factory=dict)
    plan_us: float | None = None

    @property
    def kernel(self) -> str:
        return self.ran or self.chosen

    @property
    def verdict(self) -> str:
        return verdict(self.lz_us, self.torch_us)

    def why_not(self) -> list[tuple[str, str]]:
        """(kernel id, one short line) for each kernel that did not run."""
        lines = []
        for item in self.candidates:
            if item.kernel_id == self.kernel:
                continue
            if item.accepted:
                text = f"fits, scored {item.score:g}" if item.score is not None else "fits"
                if "another" in item.outdone:
                    text += f", {item.outdone}"
                if item.kernel_id in self.others_us:
                    text += f"; timed here: {verdict(self.others_us[item.kernel_id], self.lz_us)}"
            else:
                text = item.reasons[0].message if item.reasons else "refused"
                if len(item.reasons) > 1:
                    text += f" (and {len(item.reasons) - 1} more)"
            lines.append((item.kernel_id, text))
        return lines

    def to_json(self) -> dict[str, Any]:
        found = Plain.to_json(self)
        return {**found.pop("station"), **found, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class DecodeStep(Plain):
    """One decode step: what dispatch had to do for it, and how long it took."""

    context: int
    selections: int
    lz_us: float
    torch_us: float


@dataclass(frozen=True, slots=True)
class Tour:
    """Everything the demo found."""

    version: str
    device: DeviceSpec
    dtype: str
    sizes: Sizes
    facts: tuple[tuple[str, str], ...]
    stops: tuple[Stop, ...]
    decode: tuple[DecodeStep, ...]
    decode_calls: int
    agreement: Check
    counters: dict[str, int]
    first_pass_us: float
    lz_us: float
    torch_us: float
    seconds: float

    @property
    def kernels_considered(self) -> int:
        return len({item.kernel_id for stop in self.stops for item in stop.candidates})

    @property
    def failed(self) -> list[str]:
        titles = [stop.station.title for stop in self.stops if not stop.check.ok]
        return titles if self.agreement.ok else [*titles, "paged against dense attention"]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def decode_selections(self) -> int:
        return sum(step.selections for step in self.decode)

    def to_json(self) -> dict[str, Any]:
        shown = ("version", "ok", "failed", "device", "dtype", "sizes", "kernels_considered", "stops", "seconds")
        return {
            **{name: plain(getattr(self, name)) for name in shown},
            "facts": dict(self.facts),
            "prefill": {name: getattr(self, name) for name in ("first_pass_us", "lz_us", "torch_us")},
            "decode": {
                "steps": len(self.decode),
                "calls": self.decode_calls,
                "selections": self.decode_selections,
                "paged_matches_dense": self.agreement.to_json(),
                "counters": self.counters,
                "each": plain(self.decode),
            },
        }


def verdict(us: float, against: float) -> str:
    """`us` compared with `against` in words; within five percent they are the same."""
    ratio = max(us, against) / min(us, against)
    if ratio <= 1 + _SAME:
        return "same"
    return f"{ratio:.2f}"[:4].rstrip(".") + f"× {'slower' if us > against else 'faster'}"


# -- in words ------------------------------------------------------------------------------------
def duration(us: float) -> str:
    """A time with three digits and a unit."""
    for limit, unit in ((999.5, "µs"), (999.5e3, "ms")):
        if us < limit:
            return f"{us / (limit / 999.5):.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def introduction(tour: Tour) -> str:
    """What was built, in one sentence."""
    sizes = tour.sizes
    return (
        f"One Llama-shaped block on {tour.device.name or tour.device.device_type} in {tour.dtype}: "
        f"hidden {sizes.hidden}, {sizes.heads} heads over {sizes.kv_heads} KV heads, {sizes.prompt} tokens of prompt, "
        f"{sizes.decode_steps} tokens decoded."
    )


def _row(stop: Stop, *, narrow: bool) -> tuple[str | Cell, ...]:
    kernel = stop.kernel if stop.ran in (None, stop.chosen) else f"{stop.kernel} (after {stop.chosen} failed)"
    title = stop.station.title
    first: tuple[str | Cell, ...] = (f"{title}\n  {kernel}",) if narrow else (title, Cell(kernel, "cyan"))
    speed = "green" if "faster" in stop.verdict else "yellow" if "slower" in stop.verdict else "dim"
    check = Cell(stop.check.word, "green" if stop.check.ok else "bold red")
    return (*first, duration(stop.lz_us), Cell(duration(stop.torch_us), "dim"), Cell(stop.verdict, speed), check)


def notes(stop: Stop) -> list[str]:
    """What an honest guide adds at a stop: a failover, a slow choice, and what to do about it."""
    found = []
    if stop.ran not in (None, stop.chosen):
        found.append(f"{stop.chosen} was chosen and failed; {stop.ran} ran instead.")
    fitting = [item for item in stop.candidates if item.accepted]
    if stop.kernel.startswith("reference.") and len(fitting) == 1:
        found.append(
            "Only the plain reference serves this op here. It is right everywhere and tuned nowhere; "
            "lz doctor says which backend package would bring a faster kernel."
        )
    faster = [name for name, us in stop.others_us.items() if us * _CLEARLY < stop.lz_us]
    if faster:
        by_policy = any("another" in item.outdone for item in fitting)
        decided = "The policy decided" if by_policy else "Shipped measurements and declared priorities decided"
        lock = f'lz.lock("{stop.station.op}", "{faster[0]}") would choose it'
        found.append(f"{', '.join(faster)} was faster in this measurement. {decided}; {lock}.")
    elif stop.plan_us is not None and verdict(stop.lz_us, stop.plan_us).endswith("slower"):
        found.append(
            f"{duration(stop.lz_us - stop.plan_us)} of this is the lookup. Where that matters, "
            f'lz.plan("{stop.station.op}", …) makes it once: {duration(stop.plan_us)} per call.'
        )
    return found


def decode_lines(tour: Tour) -> list[str]:
    """Which steps had to select, and whether paged and dense attention agree."""
    state = "match" if tour.agreement.ok else "DO NOT match"
    return [
        *(
            f"Context {step.context}: {step.selections} selected{_reason_to_select(tour, step.context)}."
            for step in tour.decode
            if step.selections
        ),
        f"Paged and dense attention {state} at every step (largest difference {tour.agreement.max_error:.0e}).",
    ]


def _reason_to_select(tour: Tour, context: int) -> str:
    """Why a decode step had to choose, where that can be told; begins with a comma."""
    if context == tour.decode[0].context:
        return ", because one token at a time is new after the prompt"
    if (context - 1) & (context - 2) == 0:
        return f", because the cache grew past {context - 1}, the end of a bucket"
    return ""


def summary(tour: Tour, written: Path | None) -> str:
    """The last line: how many, all right or not, where the page is."""
    checks = "all results match the reference" if tour.ok else f"WRONG results: {', '.join(tour.failed)}"
    page = "" if written is None else f", page written to {written}"
    return f"{len(tour.stops)} ops, {tour.kernels_considered} kernels considered, {checks}{page} ({tour.seconds:.0f} s)"


def blocks(tour: Tour, written: Path | None, *, narrow: bool = False) -> list[Block]:
    """The tour to read; `narrow` puts the kernel of a step below its title."""
    head = (_HEAD[0], *_HEAD[2:]) if narrow else _HEAD
    rows: list[tuple[str | Cell, ...]] = []
    group = tour.stops[0].station.group
    for stop in tour.stops:
        if stop.station.group != group:
            group = stop.station.group
            rows.append(("",) * len(head))
        rows.append(_row(stop, narrow=narrow))
    table = Table(head, rows, right=frozenset({len(head) - 4, len(head) - 3}))
    whole = (
        f"The prompt through the whole block: {duration(tour.lz_us)}, plain torch {duration(tour.torch_us)} "
        f"({verdict(tour.lz_us, tour.torch_us)}). The very first pass, with every choice to make: "
        f"{duration(tour.first_pass_us)}."
    )
    found: list[Block] = [Line(introduction(tour)), Line(), table, Line(), Line(whole)]
    if any(stop.verdict.endswith("slower") for stop in tour.stops):
        found.append(Line(_SLOWER, "dim"))
    found += [Line(), Line("Why not the others", "bold")]
    # Each op once: the first stop of an op speaks for those judged alike.
    judged: dict[tuple[str, tuple[tuple[str, bool], ...]], list[tuple[str, str]]] = {}
    for stop in tour.stops:
        how = tuple((item.kernel_id, item.accepted) for item in stop.candidates)
        judged.setdefault((stop.station.op, how), stop.why_not())
    for (op, _), reasons in judged.items():
        found.append(Line(op if reasons else f"{op}: no other kernel is registered", indent=2))
        if reasons:
            told = [(Cell(kernel_id, "cyan"), Cell(text, "dim")) for kernel_id, text in reasons]
            found.append(Table(("", ""), told, indent=4))
    counts = f"{len(tour.decode)} steps, {tour.decode_calls} calls, {tour.decode_selections} selections"
    lines = [f"{counts}: a choice is made once, then looked up while the cache grows.", *decode_lines(tour)]
    found += [Line(), Line("Decoding", "bold"), *(Line(line, indent=2) for line in lines), Line()]
    return [*found, Line(summary(tour, written), STYLES["ok" if tour.ok else "fail"]), Line(_NEXT, "dim")]
