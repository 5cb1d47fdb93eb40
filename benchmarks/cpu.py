"""The CPU kernels against torch eager, other libraries and the memory's own speed, in one interleaved run.

    python benchmarks/cpu.py --machine NAME [--tuned] [--peers compile,zentorch] [--json FILE] [--budget SECONDS]
                             [--only GROUP …] [--threads N]

Every figure is a ratio of medians from one run in which each contestant takes its turn in every round. The floor is
measured beside them: the bytes a case has to move, copied or read by the same threads. `lz` is the public function,
call overhead included, on the kernel that LayerZero chooses: by priority, or with `--tuned` by a short `lz.tune` of the
very call before it is timed; where that changes the choice, `lz untuned` is the kernel it would have been. Peers
(cpu_peers.py) are checked before they are timed; torch's own are always there. Cases come from cpu_cases_*.py. Writes
JSON and a plot beside it; ends with 1 where a case fails or is slower than eager by more than the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cpu_peers
from cpu_case import Asked, Call, Case, Peer
from cpu_figures import line, ratios, summary, verdict
from cpu_plot import plot
from timing import RESULTS, commit, interleaved, machine, write_json

LATE = 0.9  # share of the budget after which nothing is compiled or tuned any more
TIMING = 0.35  # share of it for timing, where there is something to compile or to tune


@dataclass(frozen=True)
class Run:
    """What holds for all cases: peers by kind, the database of tuning (None: not tuned), and when time is up."""

    peers: dict[str, str]
    database: Path | None
    seconds: float
    end: float

    def late(self) -> bool:
        """Whether only timing is left to be done."""
        return time.monotonic() > self.end


def cases() -> list[Case]:
    """Every case of every cpu_cases_*.py beside this file."""
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("cpu_cases_*.py")):
        found += importlib.import_module(file.stem).cases()
    return found


def tuned(asked: Asked, run: Run) -> str:
    """Measure the call's own kernels into the database; empty, or why it was not done."""
    import layerzero as lz

    if run.late():
        return "the budget was spent"
    with lz.record() as recording:
        asked.call()()
    # Compiled candidates are left out: to compile them for every case takes longer than all the rest.
    found = lz.tune(recording.traffic, database=run.database, seconds=run.seconds, fresh=True, compile=False)
    return "; ".join(found.skipped.values())


def with_peers(calls: dict[str, Call], asked: Asked, case: Case, run: Run) -> dict[str, str]:
    """Adds every peer that is right to the contestants; what is wrong with the others, by name."""
    found: list[Peer] = list(cpu_peers.peers_of(asked, run.peers))
    refused = {}
    if "compile" in run.peers and case.group in cpu_peers.COMPILED:
        if run.late():
            refused["compile"] = "not compiled: the budget was spent"
        else:
            found.append(cpu_peers.compiled(calls["eager"]))
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
    made = case.make()
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
    calls["lz"] = asked.call()
    refused = with_peers(calls, asked, case, run)
    once = {name: _once(call) for name, call in calls.items()}
    batch = max(1, min(200, int(0.002 / max(once.values()))))
    turn = batch * sum(once.values())
    # What takes seconds is no question of a few per cent: three rounds are enough for it.
    rounds = max(5 if turn < 0.5 else 3, min(101, int(budget / turn)))
    found = interleaved(calls, rounds=rounds, batch=batch)
    us = {name: round(value / 1000.0, 3) for name, value in found.items()}
    row |= {"us": us, "rounds": rounds, "batch": batch, **ratios(us, case.goals)}
    return row | {"refused": refused} if refused else row


def chosen_peers(words: str) -> list[str]:
    """Kinds of peers; torch's own come first, and a wrong word is an error."""
    kinds = [word for word in words.split(",") if word]
    wrong = sorted(set(kinds) - set(cpu_peers.KINDS))
    if wrong:
        raise SystemExit(f"--peers {','.join(wrong)}: expected some of {', '.join(cpu_peers.KINDS)}")
    return ["torch", *(kind for kind in kinds if kind != "torch")]


def about(run: Run, isa: str) -> dict[str, Any]:
    """What the figures were measured with and on, before anything runs."""
    untuned, tuned = "the choice by priority, untuned", "the kernel chosen after a short lz.tune of the call"
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": commit(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "isa": isa,
        "lz": untuned if run.database is None else tuned,
        "peers": run.peers,
    }


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="here", help="the folder of benchmarks/results")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/MACHINE/cpu.json)")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for all cases together")
    parser.add_argument("--only", nargs="*", default=[], help="groups to measure")
    parser.add_argument("--threads", type=int, help="torch's intra-op threads")
    parser.add_argument("--peers", default="", help="compile, zentorch, parted by commas; torch's own are always there")
    parser.add_argument("--tuned", action="store_true", help="lz.tune every call before it is timed")
    parser.add_argument("--tune-seconds", type=float, default=0.1, help="of timing, each call")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    kinds = chosen_peers(given.peers)
    os.environ.setdefault("LAYERZERO_PERFDB", "off")  # what was measured here before must not decide
    from layerzero_cpu.library import native

    chosen = [case for case in cases() if not given.only or case.group in given.only]
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    out = given.json or RESULTS / given.machine / "cpu.json"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if given.tuned else None
        run = Run(
            cpu_peers.load(kinds), folder / "tuned.sqlite" if folder else None, given.tune_seconds,
            begin + LATE * given.budget,
        )  # fmt: skip
        header = about(run, native.isa())
        share = TIMING if given.tuned or len(kinds) > 1 else 1.0
        for index, case in enumerate(chosen):
            left = given.budget - (time.monotonic() - begin)
            seconds = min(left / (len(chosen) - index), share * given.budget / len(chosen))
            try:
                rows.append(measured(case, max(0.2, seconds), run))
            except Exception as error:  # one case must not cost the others their figures
                print(f"{case.group:<10} {case.name:<44} failed: {type(error).__name__}: {error}"[:300])
                rows.append({"group": case.group, "case": case.name, "error": f"{type(error).__name__}: {error}"[:300]})
            else:
                print(line(rows[-1]), flush=True)
            # After every case: a run that is stopped keeps what it has measured.
            state = {"seconds": round(time.monotonic() - begin, 1), "left": len(chosen) - len(rows)}
            write_json(out, {**header, **state, "summary": summary(rows), "rows": rows})
    found = summary(rows)
    print(verdict(found))
    good = [row for row in rows if "us" in row]
    plot(good, out.with_suffix(".svg"), f"{native.isa()}, {torch.get_num_threads()} threads, against torch eager")
    return 1 if found["slower_than_eager"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
