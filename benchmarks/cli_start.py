"""How long `lz` takes to answer without torch: help, a mistake of usage, completion in a shell.

    python benchmarks/cli_start.py --machine NAME [--rounds 30]

Every command is a process of its own, in turn with the others, beside a Python that does nothing. Kept are the least
and the median of wall time, and the median of processor time, which grows less when others use the machine. Exit code
1 when the least wall time of a command is over 150 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from timing import RESULTS, commit, machine, write_json

LIMIT_MS = 150.0
# as it is for users: modules are compiled once
_ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
LZ = "from layerzero_cli import main; import sys; sys.argv[0] = 'lz'; main()"
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "python": (["pass"], {}),
    "lz --help": ([LZ, "--help"], {}),
    "lz explain --help": ([LZ, "explain", "--help"], {}),
    "lz dcotor": ([LZ, "dcotor"], {}),
    "completion of `lz explain pag`": (
        [LZ],
        {"_LZ_COMPLETE": "bash_complete", "COMP_WORDS": "lz explain pag", "COMP_CWORD": "2"},
    ),
}


def once(words: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Wall and processor milliseconds of one process."""
    before, start = os.times(), time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", *words]
    subprocess.run(command, env={**_ENV, **variables}, capture_output=True, check=False)
    wall, after = time.perf_counter() - start, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return wall * 1e3, spent * 1e3


def main() -> int:
    """Run the rounds, write the file, say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="folder under benchmarks/results")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    for words, variables in CASES.values():
        once(words, variables)  # bytecode is written
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(given.rounds):
        for name, case in CASES.items():
            times[name].append(once(*case))
    rows = {}
    for name, found in times.items():
        wall, spent = zip(*found, strict=True)
        rows[name] = {
            "least_ms": round(min(wall), 1),
            "median_ms": round(statistics.median(wall), 1),
            "processor_ms": round(statistics.median(spent), 1),
        }
        print(name.ljust(32), *(f"{key} {value}" for key, value in rows[name].items()), sep="  ")
    command = f"python benchmarks/cli_start.py --machine {given.machine} --rounds {given.rounds}"
    about = {"machine": machine(), "commit": commit(), "command": command, "load": os.getloadavg()[0]}
    write_json(RESULTS / given.machine / "cli_start.json", {**about, "limit_ms": LIMIT_MS, "commands": rows})
    return int(any(row["least_ms"] > LIMIT_MS for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
