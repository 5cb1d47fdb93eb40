"""Before anything is timed: peers tried and compiled in processes of their own; then the run itself, kept alive.

A peer may crash, hang or be slow to compile. Whatever it does, it does it first in a child (cpu_try.py) that says what
it is about to try; a child that dies is started again behind that attempt. What survived takes part in the run. The
run is a child too: should it die all the same, the figures it has written stand, the peers of other libraries are left
out of the case and its group from there on, and it goes on where it stopped.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from timing import write_json

__all__ = ["ALL", "Plan", "left_out", "prepared", "supervised", "tried"]

HERE = Path(__file__).parent
ALL = "*"  # in the place of a peer's name: every peer of other libraries
RESTARTS = 8
SHARE = 0.4  # of the budget that may go into preparing


@dataclass
class Plan:
    """What the run is told: versions by kind of peer, who is left out of which case and why, and when it all began."""

    command: str
    begin: float
    peers: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    prepared_s: float = 0.0
    died: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    resume: bool = False

    def leave_out(self, case: str, peer: str, why: str) -> None:
        """A case is named "group name"; a group alone stands for all its cases."""
        self.left_out.setdefault(case, {})[peer] = why


def left_out(plan: dict[str, dict[str, str]], case: str, group: str) -> dict[str, str]:
    """Who is left out of a case."""
    return {**plan.get(group, {}), **plan.get(case, {})}


def _ended(code: int) -> str:
    return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"


def tried(command: Sequence[str], end: float) -> tuple[str, dict[tuple[str, str], str]]:
    """Run an attempting child to its end, again behind each attempt it dies in.

    Gives the version it loaded (or why it could not), and by (case, peer) what came of it: empty for all right.
    """
    version, first = "", 0
    found: dict[tuple[str, str], str] = {}
    dead: list[str] = []
    for _ in range(RESTARTS):
        with tempfile.TemporaryFile("w+") as out:
            line = [*command, "--from", str(first), *(["--dead", *dead] if dead else [])]
            process = subprocess.Popen(line, stdout=out, stderr=subprocess.DEVNULL)
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = 0
            out.seek(0)
            said = [json.loads(text) for text in out if text.startswith("{") and text.endswith("}\n")]
        pending: dict[str, Any] | None = None
        for words in said:
            version = words.get("loaded", version)
            if "trying" in words:
                pending = words
            elif "done" in words or "why" in words:
                found.setdefault((words["case"], words["peer"]), words.get("why", ""))
                pending = None
        if code == 0:
            break
        if pending is None:
            return version or f"cannot be imported: {_ended(code)}", found
        found[pending["case"], pending["peer"]] = f"{_ended(code)} in {pending['case']}"
        dead.append(pending["kind"])
        first = pending["index"]
    return version or "cannot be imported: not within the time for it", found


def prepared(plan: Plan, kinds: Sequence[str], only: Sequence[str], threads: int | None, end: float) -> None:
    """Try zentorch and fill Inductor's cache, side by side on the cores there are; the plan is told what came of it."""
    import cpu  # heavy, and it imports this
    import cpu_peers

    rest = [*(["--threads", str(threads)] if threads else []), *(["--only", *only] if only else [])]
    start = [sys.executable, str(HERE / "cpu_try.py")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs: dict[str, list[list[str]]] = {}
    if "zentorch" in kinds:
        jobs["zentorch"] = [[*start, "zentorch", "--part", "0/1", *rest]]
    if "compile" in kinds:
        jobs["compile"] = [[*start, "compile", "--part", f"{part}/{cores}", *rest] for part in range(cores)]
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1 + cores) as pool:
        running = {kind: [pool.submit(tried, line, end) for line in lines] for kind, lines in jobs.items()}
        results = {kind: [one.result() for one in each] for kind, each in running.items()}
    groups = {"zentorch": cpu_peers.ZENTORCH, "compile": cpu_peers.COMPILED}
    for kind, each in results.items():
        plan.peers[kind] = next((version for version, _ in each if not version.startswith("cannot")), each[0][0])
        if plan.peers[kind].startswith("cannot"):
            continue
        seen: dict[tuple[str, str], str] = {}
        for _, found in each:
            seen |= found
        for (case, peer), why in seen.items():
            if why:
                plan.leave_out(case, peer, why)
        tried_ones = {case for case, _ in seen}
        for case in cpu.cases():
            wanted = case.group in groups[kind] and (not only or case.group in only)
            if wanted and cpu.key(case) not in tried_ones:
                whom = "compile" if kind == "compile" else ALL
                plan.leave_out(cpu.key(case), whom, "not tried: the time for it was up")
    plan.prepared_s = round(time.monotonic() - begin, 1)


def supervised(plan: Plan, out: Path, end: float) -> int:
    """The run itself, started again where it dies by a signal; its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        for _ in range(RESTARTS):
            write_json(file, asdict(plan))
            process = subprocess.Popen([sys.executable, str(HERE / "cpu.py"), *sys.argv[1:], "--plan", str(file)])
            try:
                code = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                print(f"stopped: longer than the budget; what was measured is in {out}")
                return 1
            if code >= 0 or -code in (signal.SIGINT, signal.SIGTERM):
                return code
            data = _of_this_run(out, plan)
            if data.get("left") == 0:  # all is measured and kept; a library fell over its own end
                return 1 if data["summary"]["slower_than_eager"] or data["summary"]["failed"] else 0
            _died(plan, data.get("now", ""), code)
    return 1


def _died(plan: Plan, now: str, code: int) -> None:
    """Next time other libraries stay out of that group; where they were out already, the case itself is given up."""
    group, why = now.split(" ")[0], f"the run {_ended(code)} in {now or 'its beginning'}"
    if ALL in plan.left_out.get(group, {}):
        plan.failed[now] = why
    plan.leave_out(group, ALL, why)
    plan.died.append(why)
    plan.resume = bool(now)
    print(f"{why}; it goes on without other libraries in {group or 'any case'}", flush=True)


def _of_this_run(out: Path, plan: Plan) -> dict[str, Any]:
    """What the file says, unless it is an older one."""
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return data if data.get("begin") == plan.begin else {}
