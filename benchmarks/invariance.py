"""The price of batch invariance: the choice under `batch_invariant` against the free choice, one interleaved run.

    python benchmarks/invariance.py --out benchmarks/results/cascade-lake/invariance.json
    python benchmarks/invariance.py --device cuda --budget 90 --out …

Every case of grid.toml for the device. Both kernels are bound first and called in turn on the same tensors, so that
drift hits both alike. A case for which no kernel declares batch_invariant is listed as refused and is in no mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch

import layerzero as lz
from layerzero.device.spec import DeviceSpec
from layerzero.dispatch.bind import bind
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import LayerZeroError
from layerzero.tuning.inputs import build, conditions, op_named
from layerzero_tune.grid import calls
from layerzero_tune.timing.clock import clock_for

GRID = Path(__file__).with_name("grid.toml")
LIMITS = {"cpu": 1.2, "cuda": 1.35}
WAYS = ("free", "invariant")
_BATCH_US = 2_000.0


def bound(op: Any, call: Any, invariant: bool) -> tuple[str, Callable[[], Any]]:
    """The kernel chosen for a call, and the call of it."""
    with lz.scoped(batch_invariant=invariant, jit="block", on_first_use="off"):
        world = current_world()
        decision = decide(op, describe(op, call.args, call.layout, None, world), world)
        if not decision.chosen:
            return "", lambda: None
        run = bind(op, decision, world, decision.chosen).run
    return decision.chosen, lambda: run(*call.args)


def timed(device: torch.device, runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """µs of each in its quickest round; a batch of each in every round, in alternating order."""
    clock, samples = clock_for(device), {way: list[float]() for way in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    counts = {way: max(1, min(200, int(_BATCH_US / max(1.0, clock(run, 1))))) for way, run in runs.items()}
    for index in range(rounds):
        for way in WAYS if index % 2 else WAYS[::-1]:
            samples[way].append(clock(runs[way], counts[way]))
    return {way: min(values) for way, values in samples.items()}


def measured(name: str, context: Any, device: torch.device, rounds: int) -> dict[str, Any]:
    """One case: both kernels, both times and their ratio; or why there is none."""
    op = op_named(context.op)
    assert op is not None
    with conditions(context), torch.no_grad():
        call = build(context, seed=7)
        found = {way: bound(op, call, way == "invariant") for way in WAYS}
        row: dict[str, Any] = {"case": name, "op": context.op, **{way: found[way][0] for way in WAYS}}
        if not row["invariant"]:
            return {**row, "refused": True}
        if row["free"] == row["invariant"]:
            return {**row, "ratio": 1.0}
        times = timed(device, {way: found[way][1] for way in WAYS}, rounds)
    return {**row, "us": {way: round(us, 2) for way, us in times.items()}, "ratio": times["invariant"] / times["free"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; cases behind it are left out and named")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, start = torch.device(given.device), time.monotonic()
    rows, left = list[dict[str, Any]](), list[str]()
    for name, recorded in calls(GRID, DeviceSpec.detect(device)):
        if time.monotonic() - start > given.budget:
            left.append(name)
            continue
        try:
            row = measured(name, recorded.context, device, given.rounds)
        except (LayerZeroError, RuntimeError) as error:
            row = {"case": name, "op": recorded.context.op, "error": f"{type(error).__name__}: {error}"[:300]}
        rows.append(row)
        shown = "refused" if "refused" in row else row.get("error") or f"{row['ratio']:.3f}"
        print(f"{name}: {row.get('free')} -> {row.get('invariant')}  {shown}", flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    price = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)) if ratios else math.inf
    by_op = {
        op: round(
            math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows if "ratio" in row and row["op"] == op)), 3
        )
        for op in sorted({row["op"] for row in rows if "ratio" in row})
    }
    data = {
        **timing.header(), "benchmark": "invariance", "device": device.type, "threads": torch.get_num_threads(),
        "figures": {"invariant ÷ free, geometric mean": {"value": round(price, 3), "at_most": LIMITS[device.type]}},
        "by_op": by_op, "worst": round(max(ratios, default=math.inf), 3), "cases": len(ratios),
        "refused": [row["case"] for row in rows if "refused" in row],
        "failed": [row["case"] for row in rows if "error" in row], "left_out": left, "rows": rows,
    }  # fmt: skip
    print(f"invariant ÷ free {price:.3f} over {len(ratios)} cases; by op {by_op}", flush=True)
    if given.out is not None:
        timing.write_json(given.out, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
