"""The soak runner sees leaks and nothing else, and its load does what it says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.soak import Sample, drift, judge

MIB = 1 << 20


def series(rss: list[int], **others: list[int]) -> list[Sample]:
    def at(name: str, place: int) -> int:
        return others[name][place] if name in others else 10

    return [
        Sample(float(n), n, value, at("tensors", n), at("descriptors", n), at("threads", n), at("shared", n))
        for n, value in enumerate(rss)
    ]


@pytest.mark.req("R-GATE-03")
def test_a_slow_leak_is_seen_through_noise_and_noise_alone_is_none() -> None:
    chance = random.Random(0)
    noise = [chance.randrange(-2 * MIB, 2 * MIB) for _ in range(60)]
    flat = [300 * MIB + step for step in noise]
    leak = [300 * MIB + step + n * MIB // 8 for n, step in enumerate(noise)]
    assert judge(series(flat))["problems"] == [] and abs(judge(series(flat))["rss_drift"]) < 0.01
    (problem,) = judge(series(leak))["problems"]
    assert "resident memory rises" in problem
    jump = [250 * MIB] * 10 + [300 * MIB] * 50  # all of it in the warm-up
    assert judge(series(jump))["problems"] == []


@pytest.mark.req("R-GATE-03")
@pytest.mark.parametrize("name", ["tensors", "descriptors", "threads", "shared"])
def test_anything_else_that_grows_is_named(name: str) -> None:
    flat = [300 * MIB] * 40
    grown = judge(series(flat, **{name: [10 + n // 12 for n in range(40)]}))
    assert grown["problems"] == [f"{name} rose from 11 to 12"]
    assert judge(series(flat, **{name: [10 + (n % 7 == 0) for n in range(40)]}))["problems"] == []


def test_the_trend_does_not_follow_one_value_that_stands_out() -> None:
    assert drift([100.0] * 20) == 0.0 and drift([100.0]) == 0.0
    assert abs(drift([100.0] * 10 + [500.0] + [100.0] * 10)) < 1e-9
    assert drift([100.0 + n for n in range(11)]) == pytest.approx(10 / 105)


@pytest.mark.req("R-GATE-03")
@pytest.mark.timeout(600)
def test_a_few_seconds_of_soak_run_clean(tmp_path: Path) -> None:
    """The real program; that memory stays flat is for `make soak` to say, in minutes.

    A machine that is too busy to do anything in a few seconds is given more of them.
    """
    out, env = tmp_path / "soak.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.soak", "--looks", "6", "--max-drift", "1", "--json", str(out)]
    for minutes in ("0.06", "0.2", "0.6", "2"):
        done = subprocess.run([*command, "--minutes", minutes], capture_output=True, text=True, env=env, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        data = json.loads(out.read_text())
        assert data["problems"] == []
        if data["calls"] > 100 and data["changes"] > 0 and len(data["samples"]) >= 3:
            return
    raise AssertionError(f"nothing much happened in two minutes: {data}")
