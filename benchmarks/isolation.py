"""What a process boundary costs: round trips to an isolated child, empty, small and with tensors.

    python benchmarks/isolation.py --machine NAME [--json FILE] [--rounds N]

Medians of one interleaved run beside a plain copy of the same tensor in this process. "there" is a tensor sent and a
number answered, "there and back" the same tensor returned. The budget is 1 ms for 4 MiB there on x86, tensor, message
and answer included. With a GPU the same is measured for its memory over CUDA IPC. Starting the child (a fresh Python
with torch) is timed once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, interleaved, machine, write_json

from layerzero.isolation.process import Settings
from layerzero.isolation.wire import IsolationFault
from layerzero.isolation.worker import Worker

MIB = 1 << 20
BUDGET_MS = 1.0


def contestants(worker: Worker, device: str) -> dict[str, Callable[[], Any]]:
    """Calls to time, by name; each is checked once before."""
    small, large = (torch.randn(size // 4, device=device) for size in (64, 4 * MIB))
    there, back = "torch:numel", "torch:detach"
    for x in (small, large):
        assert worker.call(there, (x,), {}) == x.numel()
        assert torch.equal(worker.call(back, (x,), {}), x)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    return {
        "empty round trip": worker.ping,
        "64 B there": lambda: worker.call(there, (small,), {}),
        "64 B there and back": lambda: worker.call(back, (small,), {}),
        "4 MiB there": lambda: worker.call(there, (large,), {}),
        "4 MiB there and back": lambda: worker.call(back, (large,), {}),
        "4 MiB copied in process": lambda: (large.clone(), sync()),
    }


def measure(device: str, rounds: int) -> dict[str, Any]:
    """Start a child and time it."""
    worker = Worker(Settings("benchmark"))
    started = time.perf_counter()
    worker.ping()
    start_s = time.perf_counter() - started
    try:
        times = interleaved(contestants(worker, device), rounds=rounds, batch=5)
    finally:
        worker.close()
    return {"start_s": round(start_s, 3), "median_us": {name: round(ns / 1e3, 1) for name, ns in times.items()}}


def main(argv: Sequence[str]) -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args(argv)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found: dict[str, Any] = {}
    for device in devices:
        try:
            found[device] = measure(device, given.rounds)
        except IsolationFault as error:
            found[device] = {"error": str(error)}
            print(f"{device}: {error}")
    for device, result in found.items():
        if "error" in result:
            continue
        print(f"{device}: child started in {result['start_s']} s")
        for name, us in result["median_us"].items():
            print(f"  {name:<26}{us:>10.1f} µs")
    took = found["cpu"]["median_us"]["4 MiB there"] / 1e3
    print(f"4 MiB there: {took:.2f} ms, budget {BUDGET_MS} ms on x86")
    data = {
        "command": f"python benchmarks/isolation.py --machine {given.machine}",
        "commit": commit(), "machine": machine(), "budget_ms_x86": BUDGET_MS, "devices": found,
    }  # fmt: skip
    write_json(given.json or RESULTS / given.machine / "isolation.json", data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
