"""The kept figures of baked decisions and warm-up: measured on a machine, by a command that can be given again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
