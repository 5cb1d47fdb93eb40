"""The CPU kernels against torch eager, other libraries and the memory's own speed, in one interleaved run.

    python benchmarks/cpu.py --machine NAME [--tuned] [--peers compile,zentorch] [--json FILE] [--budget SECONDS]
                             [--only GROUP …] [--threads N] [--prepare-only]

Every figure is a ratio of medians from one run in which each contestant takes its turn in every round. The floor is
measured beside them: the bytes a case has to move, copied or read by the same threads. In sampling, calls under a
millisecond are made once, untimed, before each turn: the caches that another's sort has filled are not theirs to pay
for. `lz` is the public function,
call overhead included, on the kernel that LayerZero chooses: by priority, or with `--tuned` by a short `lz.tune` of the
very call before it is timed; where that changes the choice, `lz untuned` is the kernel it would have been. Goals are
the kernel's; the public function shall reach nine tenths of them. A case that misses one, or comes out behind eager,
is timed once more and longer, and that run counts (`first_us` is the other). Where a goal is missed, cpu_profile.py
says where the time goes. Peers (cpu_peers.py) are checked before they are timed; torch's own are always there, others
are first tried, and compiled, in processes of their own (cpu_prepare.py), so that none can end the run. Inductor's
cache is a new one, or the one TORCHINDUCTOR_CACHE_DIR names, which `--prepare-only` fills beforehand. Cases come from
cpu_cases_*.py. Writes JSON after every case and a plot at the end; ends with 1 where a case fails or is slower than
eager by more than the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cpu_peers
import cpu_prepare
import cpu_profile
from cpu_case import Asked, Call, Case
from cpu_figures import line, ratios, summary, verdict
from cpu_plot import plot
from cpu_race import CLEAR, contested
from timing import RESULTS, commit, interleaved, machine, write_json

LATE = 0.9  # share of the budget after which nothing is compiled or tuned any more
TIMING = 0.35  # share of it for timing, where there is something to compile or to tune
AGAIN_S = 4.0  # for the second timing of a case, at most
APART = ("sampling",)  # groups whose contestants are a hundred times apart: one call of the slow takes every cache
BRIEF_S = 0.001  # there a call this short is made once, untimed, before it is timed
SPARE = 15.0  # seconds beyond the budget after which the run is stopped


@dataclass(frozen=True)
class Run:
    """What holds for all cases: peers by kind, the database of tuning (None: not tuned), when time is up, who is left
    out of which case."""

    peers: dict[str, str]
    database: Path | None
    seconds: float
    end: float
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    def late(self) -> bool:
        """Whether only timing is left to be done."""
        return time.monotonic() > self.end


def key(case: Case) -> str:
    """A case's name among all."""
    return f"{case.group} {case.name}"


def cases() -> list[Case]:
    """Every case of every cpu_cases_*.py beside this file; the quick ones, those of rows, first."""
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("cpu_cases_*.py"), reverse=True):
        found += importlib.import_module(file.stem).cases()
    return found


def tuned(asked: Asked, run: Run) -> str:
    """Measure the call's own kernels into the database; empty, or why it was not done."""
    import layerzero as lz

    if run.late():
        return "the budget was spent"
    if not contested(asked):
        return f"no other kernel comes within {CLEAR:g} times of it"
    with lz.record() as recording:
        asked.call()()
    # Compiled candidates are left out: to compile them for every case takes longer than all the rest.
    found = lz.tune(recording.traffic, database=run.database, seconds=run.seconds, fresh=True, compile=False)
    return "; ".join(found.skipped.values())


def with_peers(calls: dict[str, Call], asked: Asked, case: Case, run: Run) -> dict[str, str]:
    """Adds every peer that is right to the contestants; what is wrong with the others, by name."""
    found, refused = [], {}
    out = cpu_prepare.left_out(run.left_out, key(case), case.group)
    for peer in cpu_peers.peers_of(asked, run.peers):
        why = out.get(peer.name) or (out.get(cpu_prepare.ALL) if peer.name.startswith(cpu_peers.FOREIGN) else None)
        if why:
            refused[peer.name] = why
        else:
            found.append(peer)
    if "compile" in run.peers and case.group in cpu_peers.COMPILED:
        if "compile" in out or run.late():
            refused["compile"] = out.get("compile", "not compiled: the budget was spent")
        else:
            found.append(cpu_peers.compiled(calls["eager"], drawn=case.group == "sampling"))
    truth = asked.call(backend="reference")() if any(peer.truth is None for peer in found) else None
    for peer in found:
        why = cpu_peers.checked(peer, asked, truth)
        if why:
            refused[peer.name] = why
        else:
            calls[peer.name] = peer.call
    return refused


def _once(call: Call) -> float:
    """Seconds of one call after a first one; of the first where that is long already."""
    taken = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        call()
        taken = time.perf_counter() - begin
        if taken > 0.3:
            break
    return taken


def measured(case: Case, budget: float, run: Run) -> dict[str, Any]:
    """Median µs of each contestant, the ratios, and which goals are met."""
    marks = [time.monotonic()]
    made = case.make()
    marks.append(time.monotonic())
    asked = made.pop("lz")
    assert isinstance(asked, Asked)
    row: dict[str, Any] = {"group": case.group, "case": case.name, "kernel": asked.kernel()}
    calls: dict[str, Call] = {name: call for name, call in made.items() if not isinstance(call, Asked)}
    if run.database is not None:
        row["untuned_kernel"] = row["kernel"]
        why = tuned(asked, run)
        row["kernel"] = asked.kernel()
        if why:
            row["not_tuned"] = why
        if row["kernel"] != row["untuned_kernel"]:
            calls["lz untuned"] = asked.call(backend=row["untuned_kernel"])
    marks.append(time.monotonic())
    calls["lz"] = asked.call()
    refused = with_peers(calls, asked, case, run)
    marks.append(time.monotonic())
    once = {name: _once(call) for name, call in calls.items()}
    batch = max(1, min(200, int(0.002 / max(once.values()))))
    turn = batch * sum(once.values())
    # What takes seconds is no question of a few per cent: three rounds are enough for it.
    rounds = max(5 if turn < 0.5 else 3, min(101, int(budget / turn)))
    settled = {name for name, seconds in once.items() if case.group in APART and seconds < BRIEF_S}
    us = _timed(calls, rounds, batch, settled)
    row |= {"us": us, "rounds": rounds, "batch": batch, **ratios(us, case.goals)}
    if _doubtful(row):  # once more and longer, and that counts: a shared machine has bad moments
        rounds = max(rounds, min(3 * rounds, int(AGAIN_S / turn)))
        row["first_us"], us = us, _timed(calls, rounds, batch, settled)
        row |= {"us": us, "rounds": rounds, **ratios(us, case.goals)}
    if not all(goal["met"] for goal in row["goals"]):
        row["where"] = cpu_profile.where(asked, us, row["goals"])
    marks.append(time.monotonic())
    steps = zip(("make", "tune", "peers", "time"), marks, marks[1:], strict=False)
    row["seconds"] = {name: round(after - before, 2) for name, before, after in steps}
    return row | {"refused": refused} if refused else row


def _timed(calls: dict[str, Call], rounds: int, batch: int, settled: set[str]) -> dict[str, float]:
    found = interleaved(calls, rounds=rounds, batch=batch, settled=settled)
    return {name: round(ns / 1e3, 3) for name, ns in found.items()}


def _doubtful(row: dict[str, Any]) -> bool:
    """Whether a goal is missed, or the choice comes out behind eager."""
    return not all(goal["met"] for goal in row["goals"]) or row["us"]["lz"] > 1.03 * row["us"]["eager"]


def chosen_peers(words: str) -> list[str]:
    """Kinds of peers; torch's own come first, and a wrong word is an error."""
    kinds = [word for word in words.split(",") if word]
    wrong = sorted(set(kinds) - set(cpu_peers.KINDS))
    if wrong:
        raise SystemExit(f"--peers {','.join(wrong)}: expected some of {', '.join(cpu_peers.KINDS)}")
    return ["torch", *(kind for kind in kinds if kind != "torch")]


def about(run: Run, isa: str, command: str) -> dict[str, Any]:
    """What the figures were measured with and on, before anything runs."""
    untuned = "the choice by priority, untuned"
    tuned = (
        f"the kernel chosen after a short lz.tune of the call, or without where no other comes within {CLEAR:g} times"
    )
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "isa": isa,
        "lz": untuned if run.database is None else tuned,
        "peers": run.peers,
    }


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="here", help="the folder of benchmarks/results")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/MACHINE/cpu.json)")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for all cases together")
    parser.add_argument("--only", nargs="*", default=[], help="groups to measure")
    parser.add_argument("--threads", type=int, help="torch's intra-op threads")
    parser.add_argument("--peers", default="", help="compile, zentorch, parted by commas; torch's own are always there")
    parser.add_argument("--tuned", action="store_true", help="lz.tune every call before it is timed")
    parser.add_argument("--tune-seconds", type=float, default=0.1, help="of timing, each call")
    parser.add_argument("--prepare-only", action="store_true", help="try and compile the peers, time nothing")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)  # what the preparing process found
    return parser.parse_args()


def main() -> int:
    """Prepare what has to be, and measure."""
    given = options()
    kinds = chosen_peers(given.peers)
    begin = time.monotonic()
    plan = cpu_prepare.Plan("python " + " ".join(sys.argv), begin)
    out = given.json or RESULTS / given.machine / "cpu.json"
    if given.plan is not None:
        plan = cpu_prepare.Plan(**json.loads(given.plan.read_text()))
    elif len(kinds) > 1:
        with contextlib.ExitStack() as stack:
            if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes themselves run side by side
            cpu_prepare.prepared(plan, kinds, given.only, given.threads, begin + cpu_prepare.SHARE * given.budget)
            print(f"prepared in {plan.prepared_s:.0f} s; a peer is left out of {len(plan.left_out)} cases", flush=True)
            if given.prepare_only:
                return 0
            return cpu_prepare.supervised(plan, out, begin + given.budget + SPARE)
    return measure(given, kinds, plan, out)


def measure(given: argparse.Namespace, kinds: list[str], plan: cpu_prepare.Plan, out: Path) -> int:
    """Every case, printed and kept."""
    if given.threads:
        torch.set_num_threads(given.threads)
    os.environ.setdefault("LAYERZERO_PERFDB", "off")  # what was measured here before must not decide
    from layerzero_cpu.library import native

    chosen = [case for case in cases() if not given.only or case.group in given.only]
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if plan.resume else []
    done = {f"{row['group']} {row['case']}" for row in rows}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if given.tuned else None
        run = Run(
            _loaded(kinds, plan), folder / "tuned.sqlite" if folder else None, given.tune_seconds,
            plan.begin + LATE * given.budget, plan.left_out,
        )  # fmt: skip
        header = about(run, native.isa(), plan.command)
        header |= {"begin": plan.begin, "prepared_s": plan.prepared_s, "died": plan.died}
        share = TIMING if given.tuned or len(kinds) > 1 else 1.0

        def keep(now: str) -> None:
            # Before and after every case: a run that is stopped keeps what it has measured, and where it was.
            state = {"seconds": round(time.monotonic() - plan.begin, 1), "left": len(chosen) - len(rows), "now": now}
            write_json(out, {**header, **state, "summary": summary(rows), "rows": rows})

        for case in chosen:
            if key(case) in done:
                continue
            left = given.budget - (time.monotonic() - plan.begin)
            seconds = min(left / (len(chosen) - len(rows)), share * given.budget / len(chosen))
            keep(key(case))
            try:
                if key(case) in plan.failed:
                    raise RuntimeError(plan.failed[key(case)])
                if left < -SPARE / 3:
                    raise TimeoutError("not measured: the budget was spent")
                rows.append(measured(case, max(0.2, seconds), run))
            except Exception as error:  # one case must not cost the others their figures
                print(f"{case.group:<10} {case.name:<44} failed: {type(error).__name__}: {error}"[:300])
                rows.append({"group": case.group, "case": case.name, "error": f"{type(error).__name__}: {error}"[:300]})
            else:
                print(line(rows[-1]), flush=True)
        keep("")
    found = summary(rows)
    print(verdict(found))
    good = [row for row in rows if "us" in row]
    plot(good, out.with_suffix(".svg"), f"{native.isa()}, {torch.get_num_threads()} threads, against torch eager")
    return 1 if found["slower_than_eager"] or found["failed"] else 0


def _loaded(kinds: list[str], plan: cpu_prepare.Plan) -> dict[str, str]:
    """Versions by kind; what could not be imported in a process of its own, or ended this one, is not imported here."""
    out = plan.left_out.get("", {}).get(cpu_prepare.ALL)
    broken = {kind: f"cannot be imported: {out}" for kind in kinds if out and kind in cpu_peers.FOREIGN}
    broken |= {kind: why for kind, why in plan.peers.items() if why.startswith("cannot")}
    return {**cpu_peers.load([kind for kind in kinds if kind not in broken]), **broken}


if __name__ == "__main__":
    sys.exit(main())
