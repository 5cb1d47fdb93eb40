"""One thread against all, and both schedulers: what is kept covers every CPU kernel, and its parity check can fail."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.dispatch.run import current_world
from layerzero.model.device import DeviceSpec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = sorted(BENCHMARKS.glob("results/*/threads.json"))


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("benchmarks_threads", BENCHMARKS / "threads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["benchmarks_threads"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    lz.reset()
    yield module
    del sys.modules["benchmarks_threads"]
    lz.reset()


@pytest.mark.req("R-TUNE-08")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_run_held_parity_for_every_kernel_and_says_what_it_is(path: Path) -> None:
    data = json.loads(path.read_text())
    assert data["commit"] and data["command"].startswith("python benchmarks/threads.py") and data["threads"] >= 2
    assert data["missing"] == [] and len(data["rows"]) >= 40
    assert {row["scheduler"] for row in data["rows"]} == {"OpenMP", "own pool"}
    for row in data["rows"]:
        assert row["parity"]["ok"], row
        assert {"1 thread", "all threads", "4 callers"} == set(row["us"]) and row["rounds"] >= 5
        if row["scheduler"] == "own pool":  # its results depend on the inputs alone, see docs/cpu.md
            assert row["parity"]["threads"] == "bits", row
    assert len(data["schedulers"]) >= 10 and all(item["ok"] for item in data["schedulers"])


@pytest.mark.req("R-TUNE-08")
def test_what_is_kept_covers_every_cpu_kernel_of_this_machine(bench: ModuleType) -> None:
    here = DeviceSpec.detect("cpu").name
    found = [json.loads(path.read_text()) for path in KEPT]
    mine = next((item for item in found if item["machine"]["cpu"] == here), None)
    if mine is None:
        pytest.skip("no run is kept for a CPU like this one: python benchmarks/threads.py --machine NAME")
    kernels = {spec.kernel_id for spec in bench.covered()}
    assert len(kernels) >= 40
    assert kernels - {row["kernel"] for row in mine["rows"]} == set()


@pytest.mark.req("R-TUNE-08")
def test_every_cpu_kernel_here_has_a_call_in_the_table(bench: ModuleType) -> None:
    assert {spec.op for spec in bench.covered()} - set(bench.CALLS) == set()


@dataclass
class Planted:
    """Work whose result depends on something it should not."""

    spec: Any
    result: Callable[[], torch.Tensor]
    dtype: str = "float32"
    case: str = ""
    args: tuple[Any, ...] = (torch.zeros(4, 8),)

    def __call__(self) -> torch.Tensor:
        return self.result()


@pytest.mark.req("R-TUNE-08")
def test_results_that_depend_on_threads_are_found(bench: ModuleType) -> None:
    spec = current_world().registry.kernels["torch.rms_norm.native"]
    assert spec.deterministic
    main, before, ones, runs = threading.main_thread(), torch.get_num_threads(), torch.ones(3), [0]

    def drifting() -> torch.Tensor:
        runs[0] += 1
        return ones + runs[0] * 1e-9 + runs[0]

    found = {}
    for name, result in {
        "right": lambda: ones,
        "last bit of the count": lambda: ones * (1 + (torch.get_num_threads() > 1) * 2.0**-23),
        "far off with the count": lambda: ones * torch.get_num_threads(),
        "another thread": lambda: ones + (threading.current_thread() is not main) * 2.0**-23,
        "another call": drifting,
    }.items():
        work = Planted(spec, result)
        callers = bench.Callers(work)
        try:
            found[name] = bench.parity(work, 2, callers)
        finally:
            callers.close()
            torch.set_num_threads(before)
    assert found["right"] == {**dict.fromkeys(found["right"], "bits"), "ok": True}
    assert found["last bit of the count"]["threads"] == "within" and found["last bit of the count"]["ok"]
    assert found["far off with the count"]["threads"] == "differs"
    assert found["another thread"]["callers, 1"] == "differs"
    assert found["another call"]["again, 1"] == "differs"
    assert [name for name, item in found.items() if not item["ok"]] == [
        "far off with the count", "another thread", "another call"
    ]  # fmt: skip


def test_a_caller_that_raises_is_heard(bench: ModuleType) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel today")

    callers = bench.Callers(broken)
    with pytest.raises(RuntimeError, match="no kernel today"):
        callers.run(1)
    callers.failed.clear()
    callers.close()
