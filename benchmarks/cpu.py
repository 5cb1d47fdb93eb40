"""The CPU kernels against torch eager and against the memory's own speed, in one interleaved run.

    python benchmarks/cpu.py --machine NAME [--json FILE] [--budget SECONDS] [--only GROUP …] [--threads N] [--compile]

Every figure is a ratio of medians from one run in which each contestant takes its turn in every round. The floor is
measured beside them: the bytes a case has to move, copied or read by the same threads. `--compile` adds torch.compile
(minutes). Cases come from cpu_cases_*.py. Writes JSON and a plot beside it; ends with 1 where a case is slower than
eager.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cpu_case import Case
from cpu_plot import plot
from timing import RESULTS, commit, interleaved, machine, write_json


def cases() -> list[Case]:
    """Every case of every cpu_cases_*.py beside this file."""
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("cpu_cases_*.py")):
        found += importlib.import_module(file.stem).cases()
    return found


def measured(case: Case, budget: float, compiled: bool) -> dict[str, Any]:
    """Median µs of each contestant, the ratios, and which goals are met."""
    contestants = case.make()
    if compiled:
        contestants["compile"] = torch.compile(contestants["eager"])
    once: dict[str, float] = {}
    for name, call in contestants.items():  # warm-up, and a first guess of the batch sizes
        call()
        begin = time.perf_counter()
        call()
        once[name] = time.perf_counter() - begin
    batch = max(1, min(200, int(0.002 / max(once.values()))))
    rounds = max(5, min(101, int(budget / (batch * sum(once.values())))))
    found = interleaved(contestants, rounds=rounds, batch=batch)
    us = {name: round(value / 1000.0, 3) for name, value in found.items()}
    row: dict[str, Any] = {"group": case.group, "case": case.name, "us": us, "rounds": rounds, "batch": batch}
    row["speedup"] = round(us["eager"] / us["lz"], 3)
    if "floor" in us:
        row["of_floor"] = round(us["floor"] / us["lz"], 3)
    row["goals"] = [
        {"against": g.against, "factor": g.factor, "reached": round(us[g.against] / us["lz"], 3)}
        for g in case.goals
        if g.against in us
    ]
    for goal in row["goals"]:
        goal["met"] = goal["reached"] >= goal["factor"]
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    us = row["us"]
    times = "  ".join(f"{name} {value:.1f}" for name, value in us.items())
    goals = " ".join(
        f"[{'ok' if g['met'] else 'MISSED'} {g['reached']:.2f} of {g['factor']:g} {g['against']}]" for g in row["goals"]
    )
    floor = f", {100 * row['of_floor']:.0f} % of the floor" if "of_floor" in row else ""
    return f"{row['group']:<10} {row['case']:<44} {row['speedup']:6.2f}× eager{floor}  {goals}  µs: {times}"


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="here", help="the folder of benchmarks/results")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/MACHINE/cpu.json)")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all cases together")
    parser.add_argument("--only", nargs="*", default=[], help="groups to measure")
    parser.add_argument("--threads", type=int, help="torch's intra-op threads")
    parser.add_argument("--compile", action="store_true", help="add torch.compile")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    from layerzero_cpu.library import native

    chosen = [case for case in cases() if not given.only or case.group in given.only]
    rows = []
    begin = time.monotonic()
    with torch.no_grad():
        for index, case in enumerate(chosen):
            left = given.budget - (time.monotonic() - begin)
            try:
                rows.append(measured(case, max(0.2, left / (len(chosen) - index)), given.compile))
            except Exception as error:  # one case must not cost the others their figures
                print(f"{case.group:<10} {case.name:<44} failed: {type(error).__name__}: {error}"[:300])
                rows.append({"group": case.group, "case": case.name, "error": f"{type(error).__name__}: {error}"[:300]})
                continue
            print(line(rows[-1]), flush=True)
    good = [row for row in rows if "us" in row]
    slower = [row["case"] for row in good if row["speedup"] < 1.0]
    missed = sum(not goal["met"] for row in good for goal in row["goals"])
    total = sum(len(row["goals"]) for row in good)
    print(f"{len(good)} cases, {total - missed} of {total} goals met, {len(slower)} slower than eager: {slower}")
    out = given.json or RESULTS / given.machine / "cpu.json"
    write_json(
        out,
        {
            "command": "python " + " ".join(sys.argv),
            "commit": commit(),
            "machine": machine(),
            "threads": torch.get_num_threads(),
            "isa": native.isa(),
            "rows": rows,
        },
    )
    plot(good, out.with_suffix(".svg"), f"{native.isa()}, {torch.get_num_threads()} threads, against torch eager")
    return 1 if slower or len(good) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
