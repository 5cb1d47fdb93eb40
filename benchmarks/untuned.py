"""How good the choice is where nobody has tuned: against the best kernel, and against what a torch user writes.

    python benchmarks/untuned.py [--device cuda] [--cases 60] [--seed N] [--budget 300] [--json FILE]

Draws calls that are in no grid (`drawing.py`) with a seed that is printed, a new one each run unless it is given. Each
is raced once, interleaved: every kernel that may run it and is right, torch's own code, and the public function. No
times of this machine are known: what the packages brought along, or less, chooses (`ranked_by`). On CUDA, calls under
50 µs are timed again in replayed graphs. `--compile` names the backends whose kernels may be compiled first (all, none,
or names); the choice is asked for after that. `--prepare N` compiles for all cases in N processes before the first is
raced, `--prepare-only` ends after that: the run itself, with the same seed, then finds everything on disk.

The goals stand beside the figures. A run that the budget ended says how many cases it reached.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from drawing import compile_for, drawn, prepare
from timing import commit, machine, write_json

LONG_US = 50.0
MORE_US = 3.0
# device -> figure -> limit
GOALS = {
    "cuda": {"oracle geomean": 1.05, "oracle worst": 1.25, "torch": 0.97},
    "cpu": {"oracle geomean": 1.05, "oracle worst": 1.30, "torch": 0.95},
}


def measured(call: Any, seconds: float, compiled: str) -> dict[str, Any]:
    """One case, eager; and on CUDA, where it is short, in replayed graphs."""
    from tuned import ready

    import layerzero as lz
    from layerzero_cli.calls import context
    from layerzero_tune.bench.contest import compete

    began = time.monotonic()
    ctx = context(call.op, call.options)
    only = ready(ctx, compiled)
    if call.options["device"] == "cuda":  # what counts is the choice after that
        compile_for(ctx, only)
    compiled_s = time.monotonic() - began
    record = compete(call.name, ctx, seconds=seconds, only=only or ()).to_json()
    if call.options["device"] == "cuda" and record["torch"].get("us", math.inf) < LONG_US:
        right = [name for name, entry in record["kernels"].items() if "us" in entry]
        graph = compete(call.name, ctx, seconds=seconds, mode="graph", only=right, check=False)
        record["graph"] = graph.to_json()
    ranked_by = lz.explain(call.op, ctx).to_dict()["ranked_by"]
    took = {"compile_s": round(compiled_s, 2), "all_s": round(time.monotonic() - began, 2)}
    return {**record, "ranked_by": ranked_by, "bytes": call.bytes, "operations": call.operations, **took}


def judged(record: dict[str, Any], least: float) -> dict[str, Any]:
    """Chosen ÷ oracle, × torch, and whether the call did no harm."""
    times = {name: entry["us"] for name, entry in record["kernels"].items() if "us" in entry}
    found: dict[str, Any] = {"chosen": record["chosen"], "best": record["best"], "ranked_by": record.get("ranked_by")}
    if record["chosen"] in times:
        found["oracle"] = times[record["chosen"]] / min(times.values())
    plain, call = record["torch"].get("us"), record["call"].get("us")
    if plain is None or call is None:
        return found
    found.update(torch_us=plain, call_us=call, torch=plain / call)
    if plain >= LONG_US:
        found["ok"] = plain / call >= least
        return found
    few = call - plain <= MORE_US
    if "graph" in record:
        graph = record["graph"]
        own, other = graph["kernels"].get(graph["chosen"], {}).get("us"), graph["torch"].get("us")
        if own and other:
            found["graph"] = other / own
            found["ok"] = few and other / own >= least
            return found
    found["ok"] = few or plain / call >= least
    return found


def geomean(values: list[float]) -> float | None:
    return round(math.exp(statistics.fmean(map(math.log, values))), 4) if values else None


def summary(found: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The figures, each with its limit."""
    goals = GOALS[device]
    oracle = [item["oracle"] for item in found if "oracle" in item]
    torch = [item["torch"] for item in found if "torch" in item]
    harmed = [item["name"] for item in found if not item.get("ok", True)]
    told = {
        "chosen ÷ oracle, geomean": (geomean(oracle), "at most", goals["oracle geomean"]),
        "chosen ÷ oracle, worst": (round(max(oracle), 4) if oracle else None, "at most", goals["oracle worst"]),
        f"calls slower than torch (under {goals['torch']}, or {MORE_US:g} µs)": (len(harmed), "at most", 0),
    }
    figures = {
        name: {"value": value, side.replace(" ", "_"): limit, "met": value is not None and value <= limit}
        for name, (value, side, limit) in told.items()
    }
    short = [item["graph"] for item in found if "graph" in item]
    sources = {str(item["ranked_by"]) for item in found if item.get("ranked_by")}
    return {
        "figures": figures,
        "× torch, geomean": geomean(torch),
        "× torch, worst": round(min(torch), 4) if torch else None,
        "× torch in replayed graphs, geomean": geomean(short),
        "compared with torch": len(torch),
        "ranked by": {word: sum(item.get("ranked_by") == word for item in found) for word in sorted(sources)},
        "slower than torch": harmed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--seconds", type=float, default=0.3, help="of racing a case")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--compile", default="none", help="backends that may compile kernels here, all or none")
    parser.add_argument("--prepare", type=int, default=0, help="compile first, in so many processes at once")
    parser.add_argument("--prepare-seconds", type=float, default=300.0, help="the most that may take")
    parser.add_argument("--prepare-only", action="store_true", help="end when that is done")
    parser.add_argument("--json", type=Path, default=Path("build/untuned.json"))
    given = parser.parse_args()
    # No times of this machine: the file is not there. Nothing compiles beside a measurement.
    nowhere = Path(tempfile.mkdtemp(prefix="untuned-")) / "none.db"
    os.environ.update(LAYERZERO_PERFDB=str(nowhere), LAYERZERO_JIT="off")
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {seed}, {given.cases} cases on {device}", flush=True)
    begin = time.monotonic()
    if given.prepare:
        took = prepare(seed, device, given.cases, given.compile, given.prepare, given.prepare_seconds)
        print(f"compiled in {given.prepare} processes for {took} s", flush=True)
    if given.prepare_only:
        return 0
    load = round(os.getloadavg()[0], 2)
    records, found, failed = [], [], {}
    for number, call in enumerate(drawn(seed, device)):
        if number >= given.cases or time.monotonic() - begin > given.budget:
            break
        try:
            record = measured(call, given.seconds, given.compile)
        except Exception as error:  # one case that does not fit must not end the run
            failed[call.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        item = {"name": call.name, **judged(record, GOALS[device]["torch"])}
        records.append(record)
        found.append(item)
        words = (f"{key} {item[key]:.3f}" for key in ("oracle", "torch", "graph") if key in item)
        print(
            f"{'ok  ' if item.get('ok', True) else 'SLOW'} {', '.join(words)}: {item['chosen']}, {call.name}",
            flush=True,
        )
    told = summary(found, device)
    write_json(given.json, {
        "seed": seed, "device": device, "commit": commit(), "machine": machine(), "load": load,
        "threads": torch.get_num_threads(), "command": shlex.join(["python", "benchmarks/untuned.py", *sys.argv[1:]]),
        "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "seconds": round(time.monotonic() - begin, 1),
        "asked": given.cases, "reached": len(found) + len(failed), "failed": failed, **told, "cases": found,
        "records": records,
    })  # fmt: skip
    for name, item in told["figures"].items():
        print(f"{'met ' if item['met'] else 'MISS'} {name}: {item['value']} (at most {item['at_most']})")
    print(
        f"× torch: geomean {told['× torch, geomean']}, worst {told['× torch, worst']}, of {told['compared with torch']}"
    )
    slow = sorted(records, key=lambda item: -item["all_s"])[:3]
    print("longest:", *(f"{item['all_s']} s ({item['compile_s']} s compiling) {item['name']};" for item in slow))
    print(f"{len(found)} of {given.cases} cases, {len(failed)} failed, load {load}; wrote {given.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
