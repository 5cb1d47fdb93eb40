"""One call tuned: every kernel that fits is checked against the reference, then those that are right race.

    found = trial(context)
    found.winner, found.times["sdpa.attention.flash"].median_us, found.refused

Torch's own code for the call races with them, in the same rounds and by the same clock. Where what selection would make
of the times is slower than that, the race is run again, and when it stays so no time is kept: `lost` says it.

A kernel is run as dispatch would run it, transforms of layout and dtype included, with torch's modes as the context
describes them; where a gradient is asked for, forward and backward are timed together. Kernels that compile do so here:
tuning is no request.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.dispatch.failover import out_of_memory
from layerzero.dispatch.run import describe
from layerzero.errors import TuningError
from layerzero.json_form import plain
from layerzero.measurements.believed import NOISE, judged, platform_of, versions_of
from layerzero.model.context import Context
from layerzero.model.decision import Expectation
from layerzero.perfdb.measurement import Measurement, Surroundings
from layerzero.runtime.proof_registry import proof_registry
from layerzero.runtime.state import state
from layerzero.selection.world import World, measurement_settings
from layerzero.telemetry.events import observed
from layerzero.tuning.inputs import ArgumentStrides, Call, build, buildable, conditions
from layerzero_tune.candidates import Bench
from layerzero_tune.rows import refused_row, row, surroundings
from layerzero_tune.ruled_out import chosen_now, margin, ruled_out, slower
from layerzero_tune.timing.baselines import TORCH_DEFAULT, loses
from layerzero_tune.timing.host_load import load, others, with_little_steal
from layerzero_tune.timing.race import Times, leader, winner_of

_TRIES = 3  # races of a call whose choice is slower than torch's own code: a busy machine may have decided


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found for one call.

    context  the call as dispatch sees it, on the tensors that were timed
    times    µs by kernel id, `errors` their largest deviation from the reference
    refused  kernels that were not timed, with the reason: wrong, raised, or could not be imported
    stolen   share of the time on a CPU that its host gave to others meanwhile, after up to three tries
    busy     share of the cores that other programs used meanwhile
    torch    what torch's own code for the call took in the same rounds; None where it has none
    choice   the kernel that selection takes from these times; `lost`: it is slower than torch's code, so that `rows`
             hold no times
    before   the kernel that was chosen before
    ruled_out  kernels that did not race, with what is expected of them; `late` those that were not compiled in time
    """

    context: Context
    times: Mapping[str, Times]
    errors: Mapping[str, float]
    refused: Mapping[str, str]
    winner: str
    clear: bool
    seconds: float
    rows: tuple[Measurement, ...] = field(default=(), repr=False)
    stolen: float = 0.0
    busy: float = 0.0
    torch: Times | None = None
    choice: str = ""
    lost: bool = False
    before: str = ""
    ruled_out: Mapping[str, Expectation] = field(default_factory=dict)
    late: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.context.op,
            "sizes": dict(self.context.dims),
            "dtype": self.context.dtype,
            **{name: plain(getattr(self, name)) for name in ("winner", "clear", "choice", "before", "refused")},
            "seconds": round(self.seconds, 3),
            "stolen": round(self.stolen, 4),
            "busy": round(self.busy, 4),
            "torch_us": None if self.torch is None else round(self.torch.median_us, 3),
            "stored": not self.lost,
            "kernels": {
                name: {
                    "median_us": round(found.median_us, 3), "p95_us": round(found.p95_us, 3),
                    "p99_us": round(found.p99_us, 3), "variance": round(found.variance, 4),
                    "samples": found.samples, "max_error": self.errors.get(name),
                }
                for name, found in sorted(self.times.items(), key=lambda item: item[1].median_us)
            },
            "ruled_out": {
                name: {**expected.to_json(), "margin": round(margin(expected), 3), "why": str(expected)}
                for name, expected in sorted(self.ruled_out.items())
            },
            "not_compiled_in_time": list(self.late),
        }  # fmt: skip


@observed("tune", lambda args, out: {"op": args[0].op, "kernel": "" if out is None else out.winner})
def trial(
    context: Context,
    *,
    seed: int = 0,
    strides: ArgumentStrides | None = None,
    seconds: float = 2.0,
    least: int = 12,
    only: frozenset[str] | None = None,
    jit: str = "block",
    patient: bool = True,
    thorough: bool = True,
    late: frozenset[str] = frozenset(),
    compile_until: float | None = None,
) -> Trial:
    """Tune one call. Raises TuningError when its inputs cannot be made or nothing can run it.

    `only` restricts it to some kernels; `seconds` bounds the timing, after every kernel has `least` samples;
    `jit="off"` leaves out kernels that would have to be compiled first. A `patient` trial times a CPU again whose host
    served others meanwhile. One that is not `thorough` leaves out what is ruled out, and looks once at those close on a
    GPU. Kernels that are `late`, not compiled yet, are left out, too; after `compile_until` those ruled out as well.
    """
    begin = time.monotonic()
    here = state.world
    spec = here.ops.get(context.op)
    if spec is None or not buildable(context.op):
        raise TuningError(code="TUNING_IMPOSSIBLE", value=context.op, limit="no inputs can be made for it")

    def call() -> Call:
        return build(context, seed=seed, strides=strides)

    with conditions(context):
        first = _made(call, context)
        measuring = measurement_settings(here, jit=jit)
        ctx = describe(spec, first.args, first.layout, None, measuring)
        # Nothing captures while a call is made; one that is meant for a graph is timed as a replayed one.
        ctx = replace(ctx, notes=(), scale=context.scale, dropout_p=context.dropout_p, capturing=context.capturing)
        bench = Bench(spec, ctx, call, measuring, late)
        bench.thorough = thorough
        out = _admitted(bench, only, {} if thorough else ruled_out(ctx, here, measuring))
        before = load()
        while True:
            for tries in range(_tries(ctx, thorough) if patient else 1, 0, -1):
                found = _timed(here, bench, ctx, seconds, least, patient)
                if not found.lost or tries == 1:
                    break
            # Of those that are ruled out, who is behind the fastest that raced, too; nobody where torch's code did not
            # race: what is expected is a multiple of its time.
            kept: Mapping[str, Expectation] = {}
            if found.torch is not None:
                fastest = min(found.torch.median_us, *(times.median_us for times in found.times.values()))
                kept = slower(out, fastest / found.torch.median_us)
            if compile_until is not None and time.monotonic() > compile_until:
                bench.late |= {name for name in out if name not in kept and bench.must_compile(name)}
            if out.keys() - kept.keys() <= bench.late:
                out = kept
                break
            out = _admitted(bench, only, kept)  # others may be the fastest after all: the race is run again with them
        busy = others(before, load())
    if not ctx.needs_grad and here.registry is state.world.registry:
        proof_registry.tuned(ctx, bench.errors)
    around = surroundings(ctx, found.stolen, busy)
    wrong = [refused_row(here, ctx, name, verdict, around) for name, verdict in bench.wrong.items()]
    refused = {**bench.absent, **{name: verdict.why for name, verdict in bench.wrong.items()}}
    made = [] if found.lost else _rows(here, bench, found, around)
    return replace(
        found, refused=refused, seconds=time.monotonic() - begin, busy=busy, before=chosen_now(ctx, here),
        ruled_out=out, late=tuple(sorted(bench.late)), rows=(*made, *(item for item in wrong if item is not None)),
    )  # fmt: skip


def _admitted(bench: Bench, only: frozenset[str] | None, out: Mapping[str, Expectation]) -> Mapping[str, Expectation]:
    """Admit all but those that are ruled out, and those too where nobody else can run; who is out after that."""
    try:
        bench.admit(only, out)
    except TuningError:
        if not out:
            raise
        bench.admit(only)
        return {}
    return out


def _timed(here: World, bench: Bench, ctx: Context, seconds: float, least: int, patient: bool) -> Trial:
    """One race, and what selection would make of it."""
    once = functools.partial(bench.timed, seconds, least)
    on_cpu = ctx.device.device_type == "cpu"
    (found, clear), stolen = with_little_steal(once, patient=patient) if on_cpu else (once(), 0.0)
    times = {name: item for name, item in found.items() if name != TORCH_DEFAULT}
    plain = found.get(TORCH_DEFAULT)
    errors = {name: bench.errors[name] for name in times}
    told = Trial(ctx, times, errors, {}, winner_of(times, NOISE), clear, 0.0, stolen=stolen, torch=plain)
    rows = [item for item in _rows(here, bench, told, Surroundings()) if item.kernel_id != TORCH_DEFAULT]
    weighed = judged(rows, platform_of(ctx.device), lambda name: versions_of(here.registry, name)).times
    choice = leader(weighed, NOISE) if weighed else told.winner
    lost = plain is not None and loses(times[choice], plain, NOISE)
    return replace(told, choice=choice, lost=lost)


def _rows(here: World, bench: Bench, found: Trial, around: Surroundings) -> list[Measurement]:
    """The times as they are stored: of every kernel, and of torch's own code, which selection passes over."""
    made = [row(here, found.context, name, us, found.errors[name], around) for name, us in found.times.items()]
    if found.torch is not None:
        made.append(row(here, found.context, TORCH_DEFAULT, found.torch, bench.plain_error, around))
    return [item for item in made if item is not None]


def _tries(ctx: Context, thorough: bool) -> int:
    """A GPU's events do not wait for a busy host: two races tell who loses there, where nobody asked for more."""
    return _TRIES if thorough or ctx.device.device_type == "cpu" else 2


def _made(call: Callable[[], Call], context: Context) -> Call:
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise TuningError(code="TUNING_IMPOSSIBLE", value=context.op, limit=f"no memory for it: {error}") from error
