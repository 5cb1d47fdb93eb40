"""Interleaved timing: every round calls every contestant once in small batches, so that drift hits all alike."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(
    contestants: dict[str, Callable[[], Any]], *, rounds: int, batch: int, settled: Collection[str] = ()
) -> dict[str, float]:
    """Median ns per call of each contestant; one batch of each per round, in alternating order.

    Those in `settled` are called once, untimed, before each batch: a short call after a long one of somebody else would
    be timed with the caches full of that.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants.items())
    clock = time.perf_counter_ns
    for _, call in order:
        for _ in range(batch):
            call()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for name, call in order if index % 2 else reversed(order):
                if name in settled:
                    call()
                start = clock()
                for _ in range(batch):
                    call()
                samples[name].append((clock() - start) / batch)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on, without anything that names the host."""
    import torch

    from layerzero.model.device import DeviceSpec

    cpu = DeviceSpec.detect("cpu").name or platform.machine()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit measured, from LAYERZERO_COMMIT or git."""
    given = os.environ.get("LAYERZERO_COMMIT")
    if given:
        return given
    try:
        out = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        return out.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def header() -> dict[str, Any]:
    """What a file of figures says first: the commit, the command and the machine."""
    script, *given = sys.argv
    command = " ".join(("python", f"benchmarks/{Path(script).name}", *given))
    return {"commit": commit(), "command": command, "machine": machine()}


def turn(path: str) -> None:
    """Make PATH.ready and wait for PATH.go: several benchmarks compile side by side, and are timed in turn."""
    if path:
        Path(f"{path}.ready").touch()
        while not Path(f"{path}.go").exists():
            time.sleep(0.05)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
