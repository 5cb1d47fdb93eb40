"""What counting costs a hot call, and that it costs nothing while it is off.

    python benchmarks/telemetry.py --machine NAME        about a minute

Interleaved in one run: the same public call, of a kernel that does nothing, with counting off, on, and off again, in
CPU time of the thread. `lz.observe` swaps the World, so calls that make it hot again precede each batch; those are
not timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import RESULTS, commit, machine, write_json

TARGET_NS = 150.0


def first(*args: Any) -> Any:
    """A kernel that does nothing: what is left is the dispatch."""
    return args[0]


def cases() -> dict[str, Callable[[], Any]]:
    import torch

    import layerzero as lz
    from layerzero.runtime.state import state

    registry = state.world.registry
    empty = [
        replace(
            registry.kernels[f"reference.{op}.plain"], kernel_id=f"empty.{op}.first", backend="empty", priority=999.0,
            function="benchmarks.telemetry:first",
        )
        for op in ("rms_norm", "attention", "embedding")
    ]  # fmt: skip
    state.publish(registry=registry.add(empty))
    x, w = torch.ones(1, 64), torch.nn.Parameter(torch.ones(64))
    q = torch.ones(1, 2, 4, 16)
    table = torch.ones(8, 16)
    index = torch.zeros(1, dtype=torch.int64)
    return {
        "rms_norm": lambda: lz.rms_norm(x, w),
        "attention": lambda: lz.attention(q, q, q),
        "embedding": lambda: lz.embedding(index, table),
    }


def batch_ns(call: Callable[[], Any], count: int) -> float:
    for _ in range(20):
        call()
    clock = time.thread_time_ns  # what this thread computed, whatever else the machine does
    started = clock()
    for _ in range(count):
        call()
    return (clock() - started) / count


def measure(call: Callable[[], Any], rounds: int, count: int) -> dict[str, float]:
    """Medians over rounds; the differences are taken within each round, so that drift hits both alike."""
    import layerzero as lz

    off, on, cost, idle = [], [], [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            first = batch_ns(call, count)
            with lz.observe():
                counted = batch_ns(call, count)
            second = batch_ns(call, count)
            off.append((first + second) / 2)
            on.append(counted)
            cost.append(counted - (first + second) / 2)
            idle.append(second - first if number % 2 else first - second)
    finally:
        gc.enable()
    return {
        "off_ns": statistics.median(off), "on_ns": statistics.median(on), "cost_ns": statistics.median(cost),
        "after_minus_before_ns": statistics.median(idle),
    }  # fmt: skip


def cold_cost(rounds: int) -> dict[str, float]:
    """What always being timed costs a cold call, in µs: the same call with the events taken out."""
    import torch

    import layerzero as lz
    from layerzero.dispatch import run
    from layerzero.runtime.state import state

    x, w = torch.ones(1, 64), torch.ones(64)
    timed, plain = run.miss, run.miss.__wrapped__  # type: ignore[attr-defined]
    args = (state.world.ops["rms_norm"], None, None, (x, w, 1e-6), None, None)
    found: dict[str, list[float]] = {"timed": [], "plain": []}
    lz.rms_norm(x, w)
    order = (("timed", timed), ("plain", plain))
    for number in range(rounds):
        for name, function in order if number % 2 else reversed(order):
            started = time.thread_time_ns()
            for _ in range(50):
                function(args[0], state.world, *args[2:])
            found[name].append((time.thread_time_ns() - started) / 50 / 1e3)
    return {f"{name}_us": statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="folder of benchmarks/results to write telemetry.json to")
    parser.add_argument("--json", type=Path, help="file to write instead")
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--count", type=int, default=400)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from layerzero.dispatch.bind import Bound
    from layerzero.runtime.state import state

    figures = {}
    with torch.no_grad():
        calls = cases()
        for name, call in calls.items():
            figures[name] = measure(call, args.rounds, args.count)
            print(name, {key: round(value, 1) for key, value in figures[name].items()}, flush=True)
        cold = cold_cost(args.rounds)
    print("cold call", cold)
    calls["rms_norm"]()
    # Off means off: the entries of the hot table are as they would be without this module.
    guards = [entry.guard for entry in state.world.hot.values() if isinstance(entry, Bound)]
    data = {
        "benchmark": "telemetry", "command": " ".join(["python", "benchmarks/telemetry.py", *sys.argv[1:]]),
        "commit": commit(), "machine": machine(), "target_ns": TARGET_NS, "calls": figures, "cold": cold,
        "guards_while_off": sum(guard is not None for guard in guards),
    }  # fmt: skip
    where = args.json or (RESULTS / args.machine / "telemetry.json" if args.machine else None)
    if where is not None:
        write_json(where, data)
    worst = max(item["cost_ns"] for item in figures.values())
    if worst > TARGET_NS or data["guards_while_off"]:
        sys.exit(f"counting costs {worst:.0f} ns a call, the target is {TARGET_NS:.0f} ns")


if __name__ == "__main__":
    main()
