"""The long lane of isolation: 500 faults injected into real children, each answered in time, nothing left behind.

make prove NAME=isolation
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.isolation.process import Settings, uncollected
from layerzero.isolation.wire import IsolationFault
from layerzero.isolation.worker import Worker

pytestmark = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=isolation")

COUNT = 500
DEADLINE_S = 1.0
CODES = {
    "segfault": "ISOLATION_CRASHED",
    "killed": "ISOLATION_CRASHED",
    "exits": "ISOLATION_CRASHED",
    "silent": "ISOLATION_CRASHED",
    "hangs": "ISOLATION_TIMEOUT",
    "garbage": "ISOLATION_GARBAGE",
    "flipped": "ISOLATION_GARBAGE",
    "half": "ISOLATION_TRUNCATED",
    "out_of_memory": "OUT_OF_MEMORY",
    "raises": "KERNEL_RAISED",
    "quits": "KERNEL_RAISED",
}


def children() -> set[int]:
    """Every process whose parent this one is, zombies included."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry))
    return found


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.req("R-ISO-06")
@pytest.mark.timeout(0)
def test_five_hundred_faults_are_answered_in_time_and_leave_nothing(tmp_path: Path, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location("isolated_backend", Path(__file__).with_name("isolated_backend.py"))
    assert spec is not None and spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    toy.install(tmp_path / "site", tmp_path / "vendor")
    assert set(CODES) == set(toy.FAULTS)
    worker = Worker(Settings("toy", path=(str(tmp_path / "vendor"),), deadline_s=DEADLINE_S))
    draw = random.Random(20261115)
    x = torch.randn(1 << 14)
    memory, before, open_before = set(os.listdir("/dev/shm")), children(), handles()
    took: list[float] = []
    seen: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(COUNT):
        name = draw.choice(list(CODES))
        worker._not_before = 0.0  # the wait between starts is tested elsewhere
        worker.load("toyvendor:echo")
        worker.load(f"toyvendor:{name}")
        (back,), _ = worker.call("toyvendor:echo", (x,), {})
        assert torch.equal(back, x)
        began = time.monotonic()
        with pytest.raises(IsolationFault) as caught:
            worker.call(f"toyvendor:{name}", (), {})
        took.append(time.monotonic() - began)
        assert caught.value.reason.code == CODES[name], (number, name, caught.value)
        assert took[-1] < DEADLINE_S + 1.0, (number, name, took[-1])
        seen[caught.value.reason.code.value] += 1
        if number % 50 == 49:
            with capsys.disabled():
                print(f"{number + 1} faults, {worker.starts} children, worst answer {max(took):.2f} s", flush=True)
    worker.close()
    assert uncollected() == 0 and children() == before, "a process was left"
    # Other programs of the machine use /dev/shm too; ours has no name there, so its mappings are looked at as well.
    ours = re.compile(r"layerzero-[0-9a-f]{16}")
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if ours.fullmatch(name)], "shared memory was left"
    del caught, back  # an exception holds the frames it went through
    gc.collect()
    assert "memfd:layerzero" not in Path("/proc/self/maps").read_text(), "shared memory is mapped still"
    assert handles() <= open_before, "descriptors were left"
    with capsys.disabled():
        print(
            f"\n{COUNT} faults in {time.monotonic() - started:.0f} s, {worker.starts} children; answers: median "
            f"{statistics.median(took) * 1e3:.1f} ms, worst {max(took):.2f} s (deadline {DEADLINE_S} s); {dict(seen)}"
        )
