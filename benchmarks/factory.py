"""The measurements that ship with the packages: every kernel against torch's own code, at sizes that fill the space.

    python benchmarks/factory.py --out DIR [--device cuda] [--cases 400] [--budget 480] [--seconds 0.08]

Draws calls (`drawing.py`, a fixed seed, other calls than `untuned.py` draws), holds every kernel's result against the
reference, and races those that are right, short calls on a GPU in replayed graphs too; one that was wrong or raised is
listed under `refused` and has no time. What is done is kept in DIR/done.jsonl line by line, under a header with commit,
device, versions and threads: the same command goes on where a run was stopped or its budget ended. DIR/summary.json
holds the counts. Kept as results/MACHINE/factory.jsonl, `python -m tools.shipped` makes the files of the packages from
it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from drawing import part_of, prepare
from timing import commit, machine, write_json
from tuned_state import Kept

SEED = 27_000_001
TORCHS = ("torch", "sdpa")
FAR = 8.0  # kernels that are so many times slower than the fastest are not raced again in graphs


def taken(call: Any, seconds: float, compiled: str) -> dict[str, Any]:
    """One call: sizes, kind, µs of torch's code and of every kernel that was right, and who was refused why."""
    from tuned import ready

    from layerzero.measurements.shipped import SHORT_US
    from layerzero.model.situation import kind_of
    from layerzero_cli.calls import context
    from layerzero_tune.bench.contest import compete

    ctx = context(call.op, call.options)
    found = compete(call.name, ctx, seconds=seconds, least=5, only=ready(ctx, compiled) or ())
    times, graph = found.times, {}
    if call.options["device"] == "cuda" and (found.torch.us or math.inf) < SHORT_US:
        near = [name for name, us in times.items() if us < FAR * min(times.values())]
        captured = compete(call.name, ctx, seconds=seconds, least=5, mode="graph", only=near, check=False)
        if captured.times and captured.torch.us:
            graph = {"graph": {"base": captured.torch.us, "times": captured.times}}
    own = [us for name, us in times.items() if name.partition(".")[0] in TORCHS]
    return {
        "op": call.op, "kind": kind_of(found.context), "mode": "eager", "sizes": dict(found.context.dims),
        "base": found.torch.us or min(own or times.values(), default=None), "times": times,
        "errors": {name: item.error for name, item in found.kernels.items() if name in times and not item.why},
        "refused": {name: item.why for name, item in found.kernels.items() if item.why},
        "busy": round(found.busy, 3), **graph,
    }  # fmt: skip


def header_of(device: str, compiled: str) -> dict[str, Any]:
    """What was measured on, and with which versions."""
    import torch

    from layerzero.device.probe import probe_device
    from layerzero.device.signature import family_of
    from layerzero.measurements.shipped import instruction_cap
    from layerzero.runtime.state import state

    spec, backends = probe_device(device), state.world.registry.backends
    vendors = {item.vendor: item.vendor_version for item in backends.values() if item.vendor and item.vendor_version}
    return {
        "family": family_of(spec), "device": spec.name or device, "commit": commit(), "capped": instruction_cap(),
        "versions": {"torch": torch.__version__, **vendors}, "compiled": compiled,
        "threads": torch.get_num_threads() if device == "cpu" else 0,
        "backends": {name: item.version for name, item in backends.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written to")
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--first", type=int, default=0, help="the calls before this one were taken by another run")
    parser.add_argument("--cases", type=int, default=400, help="up to this one")
    parser.add_argument("--ops", default="all", help="only calls of these ops, parted by commas")
    parser.add_argument("--dtypes", default="all", help="only calls in these dtypes, parted by commas")
    parser.add_argument("--seconds", type=float, default=0.08, help="of racing a case")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for this run")
    parser.add_argument("--compile", default="none", help="backends that may compile kernels here, all or none")
    parser.add_argument("--prepare", type=int, default=0, help="compile first, in so many processes at once")
    parser.add_argument("--prepare-seconds", type=float, default=300.0, help="the most that may take")
    given = parser.parse_args()
    nowhere = Path(tempfile.mkdtemp(prefix="factory-")) / "none.db"
    os.environ.update(LAYERZERO_PERFDB=str(nowhere), LAYERZERO_JIT="off")
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.prepare:
        only = {"first": given.first, "ops": given.ops}
        took = prepare(SEED, device, given.cases, given.compile, given.prepare, given.prepare_seconds, **only)
        print(f"compiled in {given.prepare} processes for {took} s", flush=True)
    begin = time.monotonic()
    header = header_of(device, given.compile)
    kept = Kept(given.out.resolve(), header, fresh=False)
    for call in part_of(SEED, device, given.first, given.cases, given.ops, given.dtypes):
        if time.monotonic() - begin > given.budget:
            break
        if ("taken", call.name) in kept.records:
            continue
        try:
            record = taken(call, given.seconds, given.compile)
        except Exception as error:  # one call that does not fit must not end the run
            record = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        kept.put("taken", call.name, record)
    whole = kept.of("taken")
    right = [item for item in whole if item.get("times") and item.get("base")]
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    words = f"python benchmarks/factory.py; {stamp}; {len(right)} calls; load {machine()['load']}"
    refused = sorted({f"{name}: {why}" for item in right for name, why in item["refused"].items()})
    failed = {item["name"]: item["failed"] for item in whole if "failed" in item}
    summary = {"asked": given.cases, "taken": len(right), "failed": failed, "refused": refused, "made": words}
    write_json(given.out / "summary.json", summary)
    print(f"{len(right)} of {given.cases} calls taken, {len(failed)} failed, {len(refused)} refusals, in {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
