"""A planned decoder layer against the same layer with each op chosen by its own measurements, in one interleaved run.

    python benchmarks/blocks.py --machine NAME [--json FILE] [--quick] [--seconds N]

The layer's calls are recorded and tuned first (`lz.record`, `lz.tune`), as a careful user would, into a database of
this run. Contestants: `plan` is `lz.plan_block(..., measure=True)`; `per_op` calls LayerZero's public functions step by
step, as the layer is written; `own` runs the very kernels of `per_op` by the plan's machinery, so that a plan is not
praised for a shorter way to its kernels alone. These two are what a plan is judged by. Beside them `untuned`, the
kernels of the public functions before anything was tuned, by the plan's machinery; `alone`, those that a few looks at
each op, taken anew and by themselves, find fastest; `hand_fused`, public functions with the fused ops a careful author
would use (add_rms_norm, mlp). Results are compared before anything is timed. Everyone is timed in every round, also
where the plan is the path of `own`: what the two differ by is then the noise of the run. A ratio is the median of the
ratios within a round, which a busy machine disturbs least; the rounds go on until its standard error is below half a
per cent, or the seconds of the case are spent. On a GPU kernels are compiled before they are timed; FlashInfer's and
TorchInductor's take too long for that and stay out. Writes JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

import layerzero as lz
from layerzero.dispatch.run import current_world
from layerzero_tune.blocks.block import decoder_layer
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.plan import BlockPlan
from layerzero_tune.blocks.search import fastest_each, per_op, told
from layerzero_tune.timing.clock import Clock, clock_for
from layerzero_tune.timing.host_load import quick_core
from layerzero_tune.timing.race import Times

PRECISE = 0.005  # a standard error of the ratios that count: two per cent are to be told from nothing
JUDGED = ("per_op", "own")
TUNED_S = {"cpu": 1.0, "cuda": 0.3}  # for each call of the layer
LONG_US = 2_000.0  # a longer call outlasts what the threads of another leave behind


@dataclass(frozen=True)
class Case:
    """A layer and the tokens that go through it."""

    batch: int
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    dtype: str

    @property
    def name(self) -> str:
        return f"B{self.batch} S{self.tokens} H{self.hidden} {self.dtype}"


SMALL = (256, 8, 2, 32, 512)
MIDDLE = (1024, 16, 4, 64, 2816)
LLAMA = (4096, 32, 8, 128, 14336)
CPU = (
    Case(1, 1, *SMALL, "float32"),
    Case(4, 1, *SMALL, "float32"),
    Case(1, 32, *SMALL, "float32"),
    Case(1, 1, *MIDDLE, "float32"),
    Case(1, 128, *MIDDLE, "float32"),
    Case(1, 1, *SMALL, "bfloat16"),
)
CUDA = tuple(Case(batch, tokens, *LLAMA, "bfloat16") for batch, tokens in ((1, 1), (8, 1), (1, 128), (1, 2048)))


def layer(case: Case, device: str) -> dict[str, Tensor]:
    """Inputs and weights, seeded."""
    dtype, draw = getattr(torch, case.dtype), torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw, device=device) * scale).to(dtype)

    def weight(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    angles = torch.arange(case.tokens, device=device)[:, None] * torch.linspace(
        1, 0.01, case.head_dim // 2, device=device
    )
    q, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    return {
        "x": normal(case.batch, case.tokens, case.hidden), "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype),
        "ln1": 1 + normal(case.hidden, scale=0.1), "ln2": 1 + normal(case.hidden, scale=0.1),
        "wq": weight(q, case.hidden), "wk": weight(kv, case.hidden), "wv": weight(kv, case.hidden),
        "wo": weight(case.hidden, q), "w_gate": weight(case.inner, case.hidden),
        "w_up": weight(case.inner, case.hidden), "w_down": weight(case.hidden, case.inner),
    }  # fmt: skip


def step_by_step(case: Case, t: dict[str, Tensor], *, fused: bool) -> Callable[[], Tensor]:
    """The layer in LayerZero's public functions, each choosing for itself."""

    def run() -> Tensor:
        x = t["x"]
        normed = lz.rms_norm(x, t["ln1"], 1e-6)
        q, k, v = (lz.linear(normed, t[name]) for name in ("wq", "wk", "wv"))
        q = q.unflatten(-1, (case.heads, case.head_dim))
        k, v = (item.unflatten(-1, (case.kv_heads, case.head_dim)) for item in (k, v))
        q, k = lz.rope(q, k, t["cos"], t["sin"], layout="BSHD")
        out = lz.attention(q, k, v, is_causal=True, layout="BSHD").flatten(-2)
        projected = lz.linear(out, t["wo"])
        if fused:
            normed, stream = lz.add_rms_norm(projected, x, t["ln2"], 1e-6)
            return stream + lz.mlp(normed, t["w_up"], t["w_down"], t["w_gate"])
        stream = projected + x
        normed = lz.rms_norm(stream, t["ln2"], 1e-6)
        return stream + lz.linear(F.silu(lz.linear(normed, t["w_gate"])) * lz.linear(normed, t["w_up"]), t["w_down"])

    return run


def measure(case: Case, device: str, rounds: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One case: tune, plan, compare, race."""
    t = layer(case, device)
    block = decoder_layer(case.heads, case.kv_heads)
    by_functions = step_by_step(case, t, fused=False)
    by_functions()
    before = current_world()  # what had to be compiled is ready
    untuned = per_op(block, t, before, Meter(before, measure=False))
    with lz.record() as seen:
        by_functions()
    lz.tune(seen, database=folder / "perf.db", seconds=TUNED_S[device], compile=device == "cuda")
    plan = lz.plan_block(block, t, measure=True)
    each = fastest_each(block, t, before, Meter(before, measure=True))
    ways = {"own": plan.report.alone, "untuned": untuned, "alone": each}
    others = {name: BlockPlan(block, t, replace(plan.report, path=way)) for name, way in ways.items()}
    contestants: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(way, t["x"], t["cos"], t["sin"]) for name, way in {"plan": plan, **others}.items()
    }
    contestants |= {"per_op": by_functions, "hand_fused": step_by_step(case, t, fused=True)}
    wide = {name: item.double() for name, item in t.items()}
    truth = step_by_step(case, wide, fused=False)()
    errors = {name: _error(run(), truth) for name, run in contestants.items()}
    # The paths round in different places; none may be farther from the truth than twice the plain one.
    assert errors["plan"] <= 2 * errors["per_op"] + 1e-7, errors
    with quick_core() if device == "cuda" else nullcontext():  # a layer of short kernels waits for the host
        samples = rounds_of(contestants, clock_for(device), rounds, seconds)
    ratios = {f"plan_over_{other}": ratio(samples, other) for other in contestants if other != "plan"}
    medians = {name: statistics.median(values) for name, values in samples.items()}
    found = plan.explain()
    return {
        "case": case.name, **asdict(case), "median_us": medians, "error": errors,
        "same_path": told(plan.report.path) == told(plan.report.alone),
        "rounds": len(samples["plan"]),
        **{name: found.median_us for name, found in ratios.items()},
        "standard_error": {name: found.error_us for name, found in ratios.items()},
        "fused": list(found.fused), "kernels": list(plan.kernels), "note": found.note,
        **{f"{name}_kernels": list(way.kernels) for name, way in others.items()},
        "path": found.to_json()["path"], "rejected": found.to_json()["rejected"][:12],
    }  # fmt: skip


def rounds_of(
    contestants: dict[str, Callable[[], Tensor]], clock: Clock, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """µs of everyone in each round, in an order drawn anew, until the ratios are known well enough or time is up.

    Before a short sample its contestant is called untimed: the threads that the one before has left spinning are not
    its own.
    """
    for call in contestants.values():
        for _ in range(3):
            call()
    # One number of calls for everyone: samples of different lengths meet a busy machine differently.
    shortest = min(min(clock(call, 1) for _ in range(3)) for call in contestants.values())
    batch = max(1, min(50, round(1_000.0 / max(shortest, 1.0))))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    begin, order, draw = time.monotonic(), list(contestants), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for number in itertools.count(1):
            draw.shuffle(order)
            for name in order:
                if shortest < LONG_US:
                    clock(contestants[name], batch)
                samples[name].append(clock(contestants[name], batch))
            if number < 5:
                continue
            precise = number >= rounds and all(ratio(samples, other).error_us <= PRECISE for other in JUDGED)
            if precise or time.monotonic() - begin > seconds:
                break
    finally:
        gc.enable()
    return samples


def ratio(samples: dict[str, list[float]], other: str) -> Times:
    """How the plan compares, round by round: quotients instead of µs."""
    return Times.of([a / b for a, b in zip(samples["plan"], samples[other], strict=True)])


def say(row: dict[str, Any]) -> None:
    """A case in one line."""
    us, error = row["median_us"], row["standard_error"]["plan_over_own"]
    print(
        f"{row['case']:24} plan {us['plan']:9.1f} µs, functions {us['per_op']:9.1f}, their kernels {us['own']:9.1f}; "
        f"plan ÷ functions {row['plan_over_per_op']:.3f}, ÷ their kernels {row['plan_over_own']:.3f} ± {error:.3f}, "
        f"÷ untuned {row['plan_over_untuned']:.3f}, ÷ alone {row['plan_over_alone']:.3f}, ÷ hand fused "
        f"{row['plan_over_hand_fused']:.3f}; {len(row['fused'])} rewrites"
        f"{', the path of each op' if row['same_path'] else ''}",
        flush=True,
    )


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def main(argv: Sequence[str] | None = None) -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="name of the folder under benchmarks/results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds, the smallest cases")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for the rounds of one case")
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CUDA if device == "cuda" else CPU
    rows = []
    if device == "cuda":
        lz.configure(jit="block", deny=["flashinfer.*", "inductor.*"])
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for case in cases[:2] if given.quick else cases:
            row = measure(case, device, 31 if given.quick else 121, given.seconds, Path(folder))
            rows.append(row)
            say(row)
    judged = [max(row[f"plan_over_{other}"] for other in JUDGED) for row in rows]
    best, worst = min(judged), max(judged)
    print(f"against the better of op by op: best {best:.3f}, worst {worst:.3f} (limits: below 1, at most 1.02)")
    limits = {"plan ÷ op by op, best": (best, 1.0), "plan ÷ op by op, worst": (worst, 1.02)}
    targets = {name: {"value": round(value, 4), "at_most": most} for name, (value, most) in limits.items()}
    command = f"python benchmarks/blocks.py --machine {given.machine} --seconds {given.seconds:g}"
    data = {"machine": machine(), "commit": commit(), "device": device, "command": command, "targets": targets}
    path = given.json or RESULTS / given.machine / "blocks.json"
    write_json(path, {**data, "cases": rows})
    print(f"written to {path}")
    return 0 if best < 1.0 and worst <= 1.02 else 1


if __name__ == "__main__":
    sys.exit(main())
