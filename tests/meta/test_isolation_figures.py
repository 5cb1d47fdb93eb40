"""The kept figures of the isolation channel are whole, and within the budget where one was set."""

from __future__ import annotations

import json

import pytest

from tools.workspace import ROOT

FILES = sorted((ROOT / "benchmarks" / "results").glob("*/isolation.json"))


@pytest.mark.req("R-ISO-03")
def test_latency_and_throughput_are_kept_and_within_the_budget():
    """1 ms for a 4 MiB tensor sent, message and answer included, on x86."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]
    assert any(item["machine"]["arch"] == "x86_64" for item in kept), "the budget was set for x86"
    for item in kept:
        times = item["devices"]["cpu"]["median_us"]
        assert times["empty round trip"] < times["4 MiB there"] < times["4 MiB there and back"]
        assert 4 * 2**20 / (times["4 MiB there"] * 1e-6) > 4e9, "four gigabytes a second"
        if item["machine"]["arch"] == "x86_64":
            assert times["4 MiB there"] <= 1000.0 * item["budget_ms_x86"]
