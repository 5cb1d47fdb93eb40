"""The kept figures of baked decisions and warm-up: measured on a machine, by a command that can be given again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.runtime.state import state

KEPT = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/selection_store.json"))


@pytest.fixture(params=KEPT, ids=[path.parent.name for path in KEPT])
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


@pytest.fixture
def figures(kept: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = kept["figures"]
    return found


def test_some_are_kept() -> None:
    assert KEPT


@pytest.mark.req("R-TUNE-06", "R-TUNE-07")
def test_a_baked_decision_beats_one_made_at_run_time_idle_and_under_load(figures: dict[str, float]) -> None:
    assert 0 < figures["baked_us"] < figures["runtime_us"]
    assert 0 < figures["baked_under_load_us"] < figures["runtime_under_load_us"]


@pytest.mark.req("R-TUNE-06")
def test_a_warm_up_takes_the_first_call_out_of_the_request(figures: dict[str, float]) -> None:
    assert 0 < figures["first_call_warm_ms"] < figures["first_call_cold_ms"]


def test_every_budget_is_met_by_what_is_kept(kept: dict[str, Any], figures: dict[str, float]) -> None:
    assert kept["limits"] == {"table_lookup_us": 1.5, "query_us": 200.0, "open_ms": 10.0, "record_us": 1.0}
    assert all(0 <= figures[name] <= limit for name, limit in kept["limits"].items())
    assert kept["commit"] != "unknown" and "dirty" not in kept["commit"] and kept["rows"] >= 1_000_000


# -- what the command measures: the parts of it, run here with few rounds; no time counts
@pytest.fixture
def bench(built_in: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = KEPT[0].parents[2] / "selection_store.py"
    spec = importlib.util.spec_from_file_location("benchmarks_selection_store", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(path.parent))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROUNDS", 2)
    return module


@pytest.mark.req("R-TUNE-06")
def test_both_ways_to_a_decision_are_timed_alone_and_by_eight_threads_at_once(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same decision for the same call: one looked up in a solved table, one selected anew each time."""
    asked: dict[str, list[tuple[int, str]]] = {"follow": [], "select": []}

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(bench, name)

        def run(*args: Any) -> Any:
            out = real(*args)
            asked[name].append((threading.get_ident(), out.chosen))
            return out

        return run

    for name in asked:
        monkeypatch.setattr(bench, name, watched(name))
    found = bench.baked_against_runtime()
    assert set(found) == {"baked_us", "runtime_us", "baked_under_load_us", "runtime_under_load_us"}
    assert all(us > 0 for us in found.values())
    here = threading.get_ident()
    for seen in asked.values():
        assert sum(thread == here for thread, _ in seen) >= 200  # two rounds of a hundred
        assert sum(thread != here for thread, _ in seen) == 800  # a hundred in each of eight threads
    assert len({chosen for seen in asked.values() for _, chosen in seen}) == 1
    assert bench.first_lookup() > 0


@pytest.mark.req("R-TUNE-06")
def test_a_first_call_is_timed_with_and_without_a_warm_up_before_it(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that it times, run here from a fresh start each: what is left for the first call to select."""
    left: dict[str, set[int]] = {"warm": set(), "cold": set()}
    real = lz.rms_norm

    def played(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert options["check"] and command[1] == "-c"
        lz.reset()
        before = [0]

        def first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            before[0] = state.counters.selections
            return real(x, weight)

        told: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", command[2:])
            patch.setattr(lz, "rms_norm", first)
            exec(command[2], {"print": told.append})
        left[command[3]].add(state.counters.selections - before[0])
        return subprocess.CompletedProcess(command, 0, stdout=str(told[0]))

    monkeypatch.setattr(bench.subprocess, "run", played)
    found = bench.cold_start()
    assert set(found) == {"first_call_cold_ms", "first_call_warm_ms"} and min(found.values()) > 0
    assert left["warm"] == {0} and min(left["cold"]) >= 1
