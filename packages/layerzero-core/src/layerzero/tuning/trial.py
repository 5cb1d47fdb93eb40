"""One call tuned: every kernel that fits is checked against the reference, then those that are right race.

    found = trial(context)
    found.winner, found.times["sdpa.attention.flash"].median_us, found.refused

A kernel is run as dispatch would run it, transforms of layout and dtype included, with torch's modes as the context
describes them; where a gradient is asked for, forward and backward are timed together. Kernels that compile do so here:
tuning is no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerzero.dispatch.run import describe
from layerzero.errors import TuningError
from layerzero.model.context import Context
from layerzero.perfdb.measurement import Measurement
from layerzero.runtime.state import state
from layerzero.selection.world import World
from layerzero.telemetry.events import observed
from layerzero.tuning.bench import Bench
from layerzero.tuning.inputs import Call, Lying, build, buildable, conditions
from layerzero.tuning.measured import NOISE
from layerzero.tuning.neutral import neutral
from layerzero.tuning.race import Times, winner_of
from layerzero.tuning.rows import refused_row, row
from layerzero.tuning.stolen import calmly

__all__ = ["Trial", "trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found for one call.

    context  the call as dispatch sees it, on the tensors that were timed
    times    µs by kernel id, `errors` their largest deviation from the reference
    refused  kernels that were not timed, with the reason: wrong, raised, or could not be imported
    stolen   share of the time on a CPU that its host gave to others meanwhile, after up to three tries
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

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "op": self.context.op,
            "sizes": dict(self.context.dims),
            "dtype": self.context.dtype,
            "winner": self.winner,
            "clear": self.clear,
            "seconds": round(self.seconds, 3),
            "stolen": round(self.stolen, 4),
            "kernels": {
                name: {
                    "median_us": round(found.median_us, 3), "p95_us": round(found.p95_us, 3),
                    "p99_us": round(found.p99_us, 3), "variance": round(found.variance, 4),
                    "samples": found.samples, "max_error": self.errors.get(name),
                }
                for name, found in sorted(self.times.items(), key=lambda item: item[1].median_us)
            },
            "refused": dict(self.refused),
        }  # fmt: skip


@observed("tune", lambda args, out: {"op": args[0].op, "kernel": "" if out is None else out.winner})
def trial(
    context: Context,
    *,
    seed: int = 0,
    strides: Lying | None = None,
    seconds: float = 2.0,
    least: int = 12,
    noise: float = NOISE,
    only: frozenset[str] | None = None,
    jit: str = "block",
    world: World | None = None,
    patient: bool = True,
) -> Trial:
    """Tune one call. Raises TuningError when its inputs cannot be made or nothing can run it.

    `only` restricts it to some kernels; `seconds` bounds the timing, after every kernel has `least` samples;
    `jit="off"` leaves out kernels that would have to be compiled first. A `patient` trial times a CPU again whose host
    served others meanwhile.
    """
    begin = time.monotonic()
    here = state.world if world is None else world
    spec = here.ops.get(context.op)
    if spec is None or not buildable(context.op):
        raise TuningError(code="TUNING_IMPOSSIBLE", value=context.op, limit="no inputs can be made for it")

    def call() -> Call:
        return build(context, seed=seed, strides=strides)

    with conditions(context):
        first = _made(call, context)
        calm = neutral(here, jit=jit)
        ctx = describe(spec, first.args, first.layout, None, calm)
        ctx = replace(ctx, notes=(), scale=context.scale, dropout_p=context.dropout_p)
        bench = Bench(spec, ctx, call, calm)
        bench.admit(only)
        (times, clear), stolen = (
            calmly(lambda: bench.timed(seconds, least, noise), patient=patient)
            if ctx.device.device_type == "cpu"
            else (bench.timed(seconds, least, noise), 0.0)
        )
    winner = winner_of(times, noise)
    made = [row(here, spec, ctx, name, found, bench.errors[name], stolen) for name, found in times.items()]
    wrong = [refused_row(here, spec, ctx, name, verdict) for name, verdict in bench.wrong.items()]
    refused = {**bench.absent, **{name: verdict.why for name, verdict in bench.wrong.items()}}
    return Trial(
        ctx, times, {name: bench.errors[name] for name in times}, refused, winner, clear, time.monotonic() - begin,
        tuple(item for item in (*made, *wrong) if item is not None), stolen,
    )  # fmt: skip


def _made(call: Callable[[], Call], context: Context) -> Call:
    try:
        return call()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _no_room(error):
            raise
        raise TuningError(code="TUNING_IMPOSSIBLE", value=context.op, limit=f"no memory for it: {error}") from error


def _no_room(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
