"""One call, head to head: every kernel that may run it, the public function, and plain torch, in one interleaved race.

`compete` builds real tensors for a context, binds every accepted candidate, holds its result against the reference,
and times them all in the same rounds, by one rule (`clock.RULES`): where a launch counts, it counts for kernels, for
plain torch and for the public function alike. A kernel that raises, is wrong, or cannot be captured stays on the list
with the reason; it is no contestant. `svg` draws the outcome.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

import torch

from layerzero._ops.signature import public_op
from layerzero.dispatch.bind import bind
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.json_form import plain
from layerzero.model.context import Context, element_bytes
from layerzero.model.decision import Decision
from layerzero.model.op import Op, OperationSpec
from layerzero.model.variants import twins
from layerzero.selection.engine import select
from layerzero.selection.world import World, measurement_settings
from layerzero.torch_ops.functions import functions
from layerzero.tuning.inputs import Call, build, conditions
from layerzero.tuning.truth import Gate
from layerzero_tune.draws import gate as gate_of
from layerzero_tune.timing.baselines import TORCH_DEFAULT, torch_default
from layerzero_tune.timing.clock import RULES, clock_for, graphed
from layerzero_tune.timing.host_load import Pace, load, others, pace, with_little_steal
from layerzero_tune.timing.launches import with_launches
from layerzero_tune.timing.race import Times, free_device_memory, over_time, pass_screening, race, screened

CALL = "layerzero"
"""The public function itself, dispatch included."""

_CAPTURES = 3
_SCORES_LIMIT = 8 << 30  # bytes of attention scores that a kernel which writes them out may need


@dataclass(frozen=True, slots=True)
class Entry:
    """What one contestant took (µs a call), its largest error against the reference, or why it was not timed."""

    us: float | None = None
    p95_us: float | None = None
    samples: int = 0
    error: float | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and (value or name == "error")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call and how everybody did. `chosen` is what LayerZero runs for it now, `pace` the machine's own speed,
    `stolen` the share of the time on a CPU that its host gave to others, `busy` the share of the cores that other
    programs used."""

    name: str
    context: Context
    mode: str
    chosen: str
    kernels: Mapping[str, Entry]
    torch: Entry = field(default_factory=Entry)
    call: Entry = field(default_factory=Entry)
    seconds: float = 0.0
    pace: Pace | None = None
    stolen: float = 0.0
    busy: float = 0.0

    @property
    def rule(self) -> str:
        """What counts as a time here, for everybody."""
        return RULES.get(f"{self.context.device.device_type}/{self.mode}", RULES["cpu/eager"])

    @property
    def times(self) -> dict[str, float]:
        return {name: item.us for name, item in self.kernels.items() if item.us is not None}

    @property
    def best(self) -> str:
        return min(self.times, key=lambda name: (self.times[name], name), default="")

    def to_json(self) -> dict[str, Any]:
        ctx, shown = self.context, ("name", "mode", "chosen", "best", "torch", "call", "kernels", "rule")
        return {
            **{name: plain(getattr(self, name)) for name in shown},
            "op": ctx.op,
            "dtype": ctx.dtype,
            "sizes": dict(ctx.dims),
            "needs": sorted(ctx.needs),
            "causal": ctx.causal.value,
            "format": ctx.quant_format,
            "device": ctx.device.name or ctx.device.device_type,
            "seconds": round(self.seconds, 2),
            "clock": plain(self.pace),
            "stolen": round(self.stolen, 4),
            "busy": round(self.busy, 4),
        }


def compete(
    name: str,
    asked: Context,
    *,
    seconds: float = 2.0,
    least: int = 9,
    mode: str = "eager",
    only: Iterable[str] = (),
    check: bool = True,
    spread: float = 0.0,
) -> Outcome:
    """Time everybody who may run a call. `only` names kernels or backends; `check=False` compares no results; with
    `spread` the rounds on a CPU are spread over so many seconds: its speed may change from one to the next.

    Raises InvalidInputError where no tensors can be made for the op, and torch's own error where they do not fit.
    """
    spec, place = public_op(asked.op), f"{asked.device.device_type}:{asked.device.index}"
    free_device_memory()
    call = build(asked, device=place)
    with conditions(asked), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries remark on their own choices, at each call
        world = current_world()
        ctx = describe(spec, call.args, call.layout, asked.backend, world)
        if mode == "graph":
            ctx = replace(ctx, capturing=True)
        # No wish or table keeps a kernel out of the race, and none waits for its compiler.
        measuring = measurement_settings(world)
        decision = select(ctx, measuring)
        chosen = decide(spec, ctx, world).chosen
        wanted = set(only)
        names = [item for item in decision.ranking if not wanted or wanted & {item, item.partition(".")[0]}]
        gate = gate_of(spec, ctx, lambda: build(asked, device=place)) if check else None
        kernels, entries = _admitted(spec, decision, measuring, names, call, gate)
        calls: dict[str, Callable[[], Any]] = dict(kernels)
        given = dict(zip(spec.arguments, call.args, strict=False))
        plain = torch_default(ctx.op, {**given, "layout": call.layout or call.kwargs.get("layout")})
        if plain is not None:
            calls[TORCH_DEFAULT] = plain
        if chosen in kernels and mode == "eager":
            calls[CALL] = _as_written(spec, call.kwargs)
        # A kernel does not race against itself: the other name has the same time, and its own error.
        same = {} if ctx.needs_grad else twins({item: measuring.registry.kernels[item] for item in kernels})
        before, used = pace(), load()
        racing = {item: run for item, run in calls.items() if item not in same}
        clocked = functools.partial(_timed, racing, entries, place, mode, seconds, least, spread)
        (timed, spent), stolen = with_little_steal(clocked) if place.startswith("cpu") else (clocked(), 0.0)
        timed |= {item: replace(timed[of], error=entries[item].error) for item, of in same.items() if of in timed}
        speed, busy = Pace(before, pace()), others(used, load())
    return Outcome(
        name, ctx, mode, chosen, {item: timed.get(item, entries[item]) for item in entries},
        timed.get(TORCH_DEFAULT, Entry()), timed.get(CALL, Entry()), spent, speed, stolen, busy,
    )  # fmt: skip


def _as_written(op: Op, kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """The public call as people write it: what has no default by position, and only such options as differ from it."""
    parameters = op.signature.parameters
    placed, options = [], {}
    for name, value in kwargs.items():
        parameter = parameters[name]
        if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
            placed.append(value)
        elif isinstance(value, torch.Tensor) or value != parameter.default:
            options[name] = value
    return functools.partial(functions.accelerated.get(op.op_id, op.function), *placed, **options)


# -- contestants ------------------------------------------------------------------------------------
def _admitted(
    spec: OperationSpec, decision: Decision, world: World, names: list[str], call: Call, gate: Gate | None
) -> tuple[dict[str, Callable[[], Any]], dict[str, Entry]]:
    """Those who can be bound, run, and are right; and an entry for each that was asked for."""
    kernels: dict[str, Callable[[], Any]] = {}
    entries: dict[str, Entry] = {}
    sizes = {"batch": 1, "num_heads": 1, "seq_len_q": 0, "seq_len_k": 0, **dict(decision.context.dims)}
    scores = math.prod(sizes[name] for name in ("batch", "num_heads", "seq_len_q", "seq_len_k"))
    scores *= max(4, element_bytes(decision.context.dtype))
    for name in names:
        if scores > _SCORES_LIMIT and (name.startswith("reference.") or name.endswith(".math")):
            entries[name] = Entry(why=f"would write out {scores >> 30} GiB of scores")
            continue
        try:
            run = bind(spec, decision, world, name).run
            run(*call.args)
            if decision.context.device.device_type == "cuda":  # a fault of a kernel is raised where it was called
                torch.cuda.synchronize()
        except Exception as error:  # a library may raise anything
            entries[name] = Entry(why=f"{type(error).__name__}: {error}".splitlines()[0][:200])
            continue
        entries[name] = Entry()
        if gate is not None:
            verdict = gate.check(world.registry.kernels[name], run)
            error_found = verdict.max_error if math.isfinite(verdict.max_error) else None
            entries[name] = Entry(error=error_found, why="" if verdict.ok else f"wrong: {verdict.why}"[:200])
            if not verdict.ok:
                continue
        kernels[name] = functools.partial(run, *call.args)
    return kernels, entries


# -- times ------------------------------------------------------------------------------------------
def _timed(
    calls: Mapping[str, Callable[[], Any]],
    entries: Mapping[str, Entry],
    place: str,
    mode: str,
    seconds: float,
    least: int,
    spread: float = 0.0,
) -> tuple[dict[str, Entry], float]:
    clock, timed = clock_for(place) if mode == "eager" else _replayed, {}
    errors = {name: entries[name].error if name in entries else None for name in calls}
    able: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        try:
            able[name] = call if mode == "eager" else _captured(call)  # by its replays, not its launches, it is judged
        except Exception as error:
            timed[name] = Entry(error=errors[name], why=f"not captured: {type(error).__name__}")
            torch.cuda.synchronize()
    if not able:
        return timed, 0.0
    few = screened(able, clock)
    running = {name: able[name] for name in pass_screening(few)}
    if spread:
        found = over_time(running, spread)
    else:
        found = race(running, device=place, least=least, seconds=seconds, clock=clock, settle=True)
    raced = dict(found.times)
    if place.startswith("cuda") and mode == "eager":  # as tuning times them: everybody's launch counts, or nobody's
        raced = with_launches(raced, running, together=(TORCH_DEFAULT, CALL))
    raced = {name: Times.of(samples) for name, samples in few.items()} | raced
    timed |= {name: Entry(us.median_us, us.p95_us, us.samples, errors[name]) for name, us in raced.items()}
    return timed, found.seconds


def _captured(call: Callable[[], Any]) -> Callable[[], float]:
    """Replays of several captures in turn: where the results of one lie must not make the same kernel seem slower."""
    replays = itertools.cycle([graphed(call) for _ in range(_CAPTURES)])
    return lambda: next(replays)()


def _replayed(call: Callable[[], Any], count: int) -> float:
    """The clock for graphs: replaying one gives its own time."""
    return float(statistics.median(call() for _ in range(max(1, count // 20))))


_WIDTH, _LABEL, _ROW, _HEAD, _NUMBER = 900, 290, 22, 34, 130
_STYLE = """
svg { font: 13px system-ui, sans-serif; background: #fff; } text { fill: #1b2230; } .soft { fill: #5a6475; }
.bar { fill: #8aa0c8; } .chosen { fill: #1c7c46; } .torch { fill: #b9bfca; } .case { font-weight: 600; }
@media (prefers-color-scheme: dark) { svg { background: #11141b; } text { fill: #e6eaf2; } .soft { fill: #9aa5b8; }
.bar { fill: #55678f; } .chosen { fill: #63cf92; } .torch { fill: #4a5262; } }
"""


def svg(outcomes: Sequence[Outcome]) -> str:
    """The picture: one block a case, one bar a contestant, on a scale of its own; what was chosen in green."""
    parts, top = [], 10
    for outcome in outcomes:
        rows = [(name, us, "chosen" if name == outcome.chosen else "bar") for name, us in outcome.times.items()]
        if outcome.torch.us is not None:
            rows.append(("torch default", outcome.torch.us, "torch"))
        if not rows:
            continue
        parts.append(f'<text class="case" x="10" y="{top + 16}">{escape(outcome.name)}</text>')
        top += _HEAD
        longest = max(us for _, us, _ in rows)
        for name, us, kind in sorted(rows, key=lambda row: (row[1], row[0])):
            width = max(2.0, (_WIDTH - _LABEL - _NUMBER) * us / longest)
            parts.append(
                f'<text x="{_LABEL - 10}" y="{top + 14}" text-anchor="end">{escape(name)}</text>'
                f'<rect class="{kind}" x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 7}" rx="3"/>'
                f'<text class="soft" x="{_LABEL + width + 8:.1f}" y="{top + 14}">{short_time(us)}</text>'
            )
            top += _ROW
        top += 12
    height = math.ceil(top + 10)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def short_time(us: float) -> str:
    """A time with three digits."""
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"
