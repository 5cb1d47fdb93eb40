"""The kept figures of the long counts are whole, inside their limits, and say what they were made from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fuzz.targets import TARGETS
from tools.workspace import ROOT


def kept(name: str) -> list[dict[str, Any]]:
    """The figures of every machine; a lane that was never run fails here, it is not passed over."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}.json"))
    assert files, f"no figures of {name} are kept"
    found = [json.loads(file.read_bytes()) for file in files]
    for data in found:
        assert data["commit"] not in ("", "unknown") and not data["commit"].endswith("-dirty"), data["commit"]
        assert data["machine"]["cores"] and data["command"]
    return found


@pytest.mark.req("R-FUZZ-02")
def test_a_million_inputs_were_played_for_every_target_and_nothing_but_our_errors_came_out() -> None:
    for data in kept("fuzz"):
        rows = {row["target"]: row for row in data["targets"]}
        assert set(rows) == {target.name for target in TARGETS}
        for name, row in rows.items():
            assert row["iterations"] >= 1_000_000 and row["crashes"] == 0, name
            assert row["growth"][-1][1] > row["growth"][0][1], name


def test_half_an_hour_under_full_load_leaves_memory_flat() -> None:
    for data in kept("soak"):
        assert data["minutes"] >= 30 and data["problems"] == [] and data["rss_drift"] <= 0.01
        assert data["calls"] > 1_000_000 and data["faults"] > 0 and data["changes"] > 100 and data["failovers"] > 0
        for name in ("descriptors", "threads", "shared"):
            assert data[name][0] == data[name][1], name


def test_eight_ranks_agree_in_time_through_a_thousand_disagreements_and_twenty_deaths() -> None:
    for data in kept("ranks"):
        agree, disagree, kills = data["agree"], data["disagree"], data["kills"]
        assert agree["ranks"] == 8 and agree["max_s"] <= agree["target_s"] == 2.0
        assert disagree["ranks"] == 8 and disagree["rounds"] >= 1_000 and len(disagree["kinds"]) >= 4
        assert disagree["deadlocks"] == 0 and kills["hangs"] == 0 and kills["killed"] >= 20 and kills["of_them_first"]


def test_counting_costs_little_while_it_is_on_and_nothing_while_it_is_off() -> None:
    for data in kept("telemetry"):
        assert data["guards_while_off"] == 0
        for name, figures in data["calls"].items():
            assert figures["cost_ns"] <= data["target_ns"] == 150.0, name
            assert abs(figures["after_minus_before_ns"]) <= 0.03 * figures["off_ns"], name
