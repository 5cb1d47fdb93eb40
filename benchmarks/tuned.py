"""How good the tuned choice is: against the best candidate, torch default and each single library. Keeps JSON.

    python benchmarks/tuned.py --machine NAME [--device cuda] [--budget 480] [--json FILE] [--fresh]

Stages: `tune` measures the grid into a database; `cases` times every candidate of every case, torch default and the
public call in one interleaved run, with LayerZero choosing from that database; `random` does the same for fifty sizes
drawn inside the tuned buckets; `again` tunes once more, into another database, and compares the choices; `graph` (CUDA)
times the small cases again in replayed graphs. Whatever is done is kept: a run that was stopped, or whose budget was
spent, goes on where it was when the same command is given again. With `--database` the times are those that `lz tune`
has measured before, and the stage `tune` is left out.

A case whose choice came out more than 3 % behind is measured once more, three times as long (on a CPU, which may be
shared: forty rounds spread over six seconds), and that run counts; the first figure stays beside it. On CUDA a time is
the median over calls between two events each, the L2 cache overwritten before every call, as in Triton's do_bench; on a
CPU the mean of short batches, median over rounds.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json
from tuned_state import STAGES, Budget, Kept

BEHIND = 1.03
SPREAD = 6.0
SMALL_US = 60.0
METHOD = {
    "cpu": "interleaved rounds, mean of a short batch, median over rounds, warm cache",
    "cuda": "interleaved rounds, CUDA events around each call, L2 overwritten before it, median; "
    "what is shorter than its launch counts as long as the launch: kernels, torch default and the public call alike",
}


def contexts(cases: Sequence[Any], device: str) -> dict[str, Any]:
    from layerzero_cli.calls import context

    return {case.name: context(case.op, {**case.options, "device": device}) for case in cases}


def tune(
    stage: str, cases: dict[str, Any], kept: Kept, database: Path, end: float, seconds: float, compiled: str,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Tune the cases into a database until the time is up; whether all were reached."""
    from layerzero.errors import LayerZeroError
    from layerzero.perfdb.store import PerfDB
    from layerzero.recording.traffic import volume
    from layerzero.runtime.state import state
    from layerzero_tune.trial import trial

    db, whole = PerfDB(database), True
    for number, (name, ctx) in enumerate(sorted(cases.items(), key=lambda item: -volume(item[1]))):
        if (stage, name) in kept.records:
            continue
        if time.monotonic() > end:
            whole = False
            break
        say(f"{stage} {number}/{len(cases)} {name}")
        try:
            found = trial(ctx, seconds=seconds, only=ready(ctx, compiled))
        except LayerZeroError as error:
            kept.put(stage, name, {"failed": str(error).splitlines()[0][:200]})
            continue
        db.put(found.rows)
        kept.put(
            stage, name,
            {"winner": found.winner, "seconds": round(found.seconds, 2), "refused": dict(found.refused),
             "lost": found.lost, "busy": round(found.busy, 4)},
        )  # fmt: skip
    state.remeasured()
    return whole


def ready(ctx: Any, compiled: str) -> frozenset[str] | None:
    """Who may be tuned: everybody, or who needs no compiler and those whose backend may use one here."""
    if compiled == "all":
        return None
    from layerzero.runtime.state import state
    from layerzero.selection.engine import select
    from layerzero.selection.world import measurement_settings

    now = set(select(ctx, measurement_settings(state.world, jit="off")).ranking)
    may = set(compiled.split(","))
    every = select(ctx, measurement_settings(state.world)).ranking
    return frozenset(name for name in every if name in now or name.partition(".")[0] in may)


def measured(name: str, ctx: Any, database: Path, seconds: float, mode: str, spread: float = 0.0) -> dict[str, Any]:
    """One case: everybody whom tuning found right, in one race; the error of each as tuning found it."""
    from layerzero_tune.bench.contest import compete

    errors = _errors(ctx, database)
    found = compete(name, ctx, seconds=seconds, mode=mode, only=errors, check=not errors, spread=spread)
    record = found.to_json()
    for kernel, entry in record["kernels"].items():
        if kernel in errors and "us" in entry:
            entry["error"] = errors[kernel]
    return record


def _errors(ctx: Any, database: Path) -> dict[str, float]:
    """Kernels that tuning has timed for such a call, each with its error."""
    from layerzero.measurements.believed import TORCH_DEFAULT, holding, mode_of, platform_of
    from layerzero.perfdb.measurement import bucket_of
    from layerzero.perfdb.store import PerfDB
    from layerzero.runtime.state import state

    spec, platform = state.world.ops[ctx.op], platform_of(ctx.device)
    rows = PerfDB(database).find(ctx.op, bucket_of(ctx, spec.growing), mode_of(ctx.device.device_type))
    mine = [row for row in holding(rows, platform) if row.kernel_id != TORCH_DEFAULT]
    return {row.kernel_id: row.max_error for row in mine if row.max_error is not None}


def ratio(record: dict[str, Any]) -> float:
    """Chosen over oracle of one record; 1 where the choice was not timed."""
    times = {name: entry["us"] for name, entry in record["kernels"].items() if "us" in entry}
    return times[record["chosen"]] / min(times.values()) if record["chosen"] in times else 1.0


def run_cases(
    stage: str, todo: Iterator[tuple[Any, Any]], kept: Kept, database: Path, end: float, seconds: float, mode: str,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Measure cases until the time is up; whether all were reached. One that is not tuned yet has to wait."""
    whole = True
    for case, ctx in todo:
        if (stage, case.name) in kept.records:
            continue
        if not _errors(ctx, database):
            whole = False
            continue
        if time.monotonic() > end:
            return False
        say(f"{stage} {case.name}")
        try:
            record = measured(case.name, ctx, database, seconds, mode)
            first = ratio(record)
            if first > BEHIND and mode == "eager":
                spread = SPREAD if ctx.device.device_type == "cpu" else 0.0
                record = {
                    **measured(case.name, ctx, database, 3 * seconds, mode, spread), "first_ratio": round(first, 4)
                }  # fmt: skip
        except Exception as error:  # one case that does not fit must not end the run
            record = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        kept.put(stage, case.name, {**record, "tags": list(case.tags)})
    return whole


def choices(cases: dict[str, Any], database: Path) -> dict[str, str]:
    """What selection takes with the times of a database."""
    from layerzero.measurements.believed import measurements_from
    from layerzero.perfdb.store import PerfDB
    from layerzero.runtime.state import state
    from layerzero.selection.engine import select

    world = state.world
    world = world.changed(measurements=measurements_from(PerfDB(database), world))
    return {name: select(ctx, world).chosen for name, ctx in cases.items()}


def copied(source: Path, target: Path) -> None:
    """A database as it is now, also what still lies in its log."""
    with closing(sqlite3.connect(source)) as before, closing(sqlite3.connect(target)) as after:
        before.backup(after)


def gather(kept: Kept, header: dict[str, Any], alike: dict[str, Any] | None, notes: dict[str, Any]) -> dict[str, Any]:
    """The document."""
    from tuned_figures import summary, verdicts

    from layerzero_tune.report.data import FORMAT

    records = {stage: [item for item in kept.of(stage) if "failed" not in item] for stage in STAGES}
    failed = {f"{item['stage']} {item['name']}": item["failed"] for item in kept.records.values() if "failed" in item}
    refused = {item["name"]: item["refused"] for item in records["tune"] if item["refused"]}
    plain = {
        stage: [{key: value for key, value in item.items() if key != "stage"} for item in found]
        for stage, found in records.items()
    }
    found = summary(plain["cases"], plain["random"]) if plain["cases"] else {}
    return {
        "format": FORMAT,
        **header,
        **notes,
        "figures": found,
        "targets": verdicts(found, alike) if found else {},
        "agreement": alike,
        "failed": failed,
        "refused": refused,
        "cases": plain["cases"],
        "random": plain["random"],
        "graph": plain["graph"],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="names the folder under benchmarks/results")
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--grid", type=Path, default=Path(__file__).parent / "grid.toml")
    parser.add_argument("--tag", action="append", default=[], help="only cases with this tag")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=None, help="of racing a case; default 0.8, on CUDA 0.4")
    parser.add_argument("--random", type=int, default=50, help="sizes drawn inside the tuned buckets")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {','.join(STAGES)}")
    parser.add_argument("--state", type=Path, default=None, help="where what is done is kept; default build/tuned/NAME")
    parser.add_argument("--json", type=Path, default=None, help="default benchmarks/results/NAME/tuned.json")
    parser.add_argument("--compile", default="all", help="backends that may compile kernels here, or none; default all")
    parser.add_argument("--database", type=Path, default=None, help="what `lz tune` has measured, in place of `tune`")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has done")
    given = parser.parse_args()
    given.stages = [name for name in STAGES if name in given.stages.split(",")]
    if given.database is not None:
        given.stages = [name for name in given.stages if name != "tune"]
    if not given.stages:
        parser.error(f"--stages names none of {', '.join(STAGES)}")
    return given


def main() -> int:
    given = _arguments()
    folder = (given.state or Path("build") / "tuned" / given.machine).resolve()
    first, second = folder / "first.db", folder / "second.db"
    # Read when layerzero is first imported. Tuning compiles by itself; nothing may compile beside a measurement.
    os.environ.update(LAYERZERO_PERFDB=str(first), LAYERZERO_JIT="off")
    import torch
    from tuned_figures import agreement, drawn

    from layerzero.perfdb.measurement import bucket_of
    from layerzero.runtime.state import state
    from layerzero_tune.grid import load

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    seconds = given.seconds or (0.4 if device == "cuda" else 0.8)
    grid = load(given.grid).pick(device=device, tags=given.tag)
    header = {
        "commit": commit(),
        "machine": {key: value for key, value in machine().items() if key != "load"},
        "method": METHOD[device],
        "seconds_a_case": seconds,
    }
    kept = Kept(folder, header, fresh=given.fresh)
    if given.database is not None:
        copied(given.database, first)
    started, load_before = time.time(), round(os.getloadavg()[0], 2)
    budget = Budget(given.budget, given.stages)
    cases = contexts(grid.cases, device)
    by_name = {case.name: case for case in grid.cases}
    complete = {}

    def say(text: str) -> None:
        """One line that changes in a terminal, a line for each text elsewhere."""
        if sys.stderr.isatty():
            print(f"\r{text[:100]:<100}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    def bucket(ctx: Any) -> str:
        return bucket_of(ctx, state.world.ops[ctx.op].growing)

    for stage in given.stages:
        room = budget.for_stage(stage)
        end = time.monotonic() + room
        if stage in ("tune", "again"):
            place = first if stage == "tune" else second
            complete[stage] = tune(stage, cases, kept, place, end, seconds, given.compile, say)
            continue
        if stage == "random":
            same = lambda case, made: bucket(cases[case.name]) == bucket(contexts([made], device)[made.name])  # noqa: E731
            todo = ((case, contexts([case], device)[case.name]) for case in drawn(grid.cases, given.random, same))
        else:
            names = [name for name in cases if stage == "cases" or (device == "cuda" and _small(kept, name))]
            todo = ((by_name[name], cases[name]) for name in names)
        mode = "graph" if stage == "graph" else "eager"
        complete[stage] = run_cases(stage, todo, kept, first, end, seconds, mode, say)
    say("")
    alike = None
    if second.exists():
        times = {
            item["name"]: {name: entry["us"] for name, entry in item["kernels"].items() if "us" in entry}
            for item in kept.of("cases")
            if "failed" not in item
        }
        reached = {name: ctx for name, ctx in cases.items() if _errors(ctx, second)}
        alike = agreement(choices(reached, first), choices(reached, second), times)
    notes = {
        "command": shlex.join(["python", "benchmarks/tuned.py", *sys.argv[1:]]),
        "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "load": load_before,
        "complete": complete,
        "run_seconds": round(time.time() - started, 1),
    }
    data = gather(kept, header, alike, notes)
    path = given.json or RESULTS / given.machine / "tuned.json"
    write_json(path, data)
    for name, item in data["targets"].items():
        side = "at_most" if "at_most" in item else "at_least"
        print(f"{'met ' if item['met'] else 'MISS'} {name}: {item['value']} ({side.replace('_', ' ')} {item[side]})")
    undone = [name for name, done in complete.items() if not done]
    if undone:
        print(f"the budget did not reach all of: {', '.join(undone)}; give the same command again to go on")
    for name, why in data["failed"].items():
        print(f"failed: {name}: {why}")
    print(f"wrote {path}")
    return 0


def _small(kept: Kept, name: str) -> bool:
    record = kept.records.get(("cases", name), {})
    times = [entry["us"] for entry in record.get("kernels", {}).values() if "us" in entry]
    return bool(times) and min(times) < SMALL_US


if __name__ == "__main__":
    raise SystemExit(main())
