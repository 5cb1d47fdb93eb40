"""The kept figures of planned blocks: a plan beats op by op somewhere, and is behind it nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

KEPT = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/blocks.json"))


@pytest.fixture(params=KEPT, ids=[path.parent.name for path in KEPT])
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def test_a_cpu_and_a_gpu_are_kept() -> None:
    assert {json.loads(path.read_text())["device"] for path in KEPT} == {"cpu", "cuda"}


@pytest.mark.req("R-PLAN-01")
def test_a_plan_wins_somewhere_and_is_nowhere_behind_op_by_op(kept: dict[str, Any]) -> None:
    ratios = [max(row["plan_over_per_op"], row["plan_over_own"]) for row in kept["cases"]]
    assert len(ratios) >= 4 and min(ratios) < 1.0 and max(ratios) <= 1.02
    assert [item["value"] for item in kept["targets"].values()] == pytest.approx([min(ratios), max(ratios)], abs=1e-4)
    assert kept["commit"] != "unknown" and "dirty" not in kept["commit"]


def test_no_plan_is_less_exact_than_twice_the_plain_layer(kept: dict[str, Any]) -> None:
    assert all(0 < row["error"]["plan"] <= 2 * row["error"]["per_op"] + 1e-7 for row in kept["cases"])
