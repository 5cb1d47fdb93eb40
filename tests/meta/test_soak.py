"""The soak runner sees leaks and nothing else, and its load does what it says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from layerzero.health.breaker import HealthRegistry
from layerzero.model.config import BreakerSettings
from tools.soak import PATIENCE_S, Breaker, Gate, Sample, drift, judge

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


@pytest.mark.req("R-GATE-03")
def test_a_breaker_that_never_opens_and_one_that_never_closes_are_named() -> None:
    health, breaker = HealthRegistry(BreakerSettings(failures=1, successes=2)), Breaker()
    health.subscribe(breaker.heard)
    assert breaker.problems(0, time.monotonic()) == []
    assert breaker.problems(3, time.monotonic()) == ["3 faults and no breaker opened"]
    for _ in range(2):
        health.kernel_failed(breaker.kernel_id, "boom")
    assert (breaker.opened, breaker.closed) == (1, 0) and breaker.since is not None
    now = breaker.since + PATIENCE_S
    assert breaker.problems(1, now) == [] and breaker.problems(1, now + 1) == ["a breaker has not closed for 31 s"]
    health._clock = lambda: time.monotonic() + 1e6
    assert health.tick()  # half-open: two good calls close it
    for closed in (0, 1):
        health.kernel_succeeded(breaker.kernel_id)
        assert breaker.closed == closed
    assert breaker.problems(1, now + 1e9) == []


def test_the_trend_does_not_follow_one_value_that_stands_out() -> None:
    assert drift([100.0] * 20) == 0.0 and drift([100.0]) == 0.0
    assert abs(drift([100.0] * 10 + [500.0] + [100.0] * 10)) < 1e-9
    assert drift([100.0 + n for n in range(11)]) == pytest.approx(10 / 105)


def test_a_few_looks_say_nothing_about_growth() -> None:
    """Caches still fill in the first seconds; the verdict needs a run that is long enough, and says whether it was."""
    found = judge(series([300 * MIB, 310 * MIB, 320 * MIB], tensors=[30, 32, 35]))
    assert found["growth_judged"] is False and found["problems"] == []
    assert judge(series([300 * MIB] * 20))["growth_judged"] is True


@pytest.mark.fault(33)
def test_a_look_waits_for_calls_under_way() -> None:
    """However long a round takes, the process is looked at between two rounds."""
    gate, stop, inside = Gate(), threading.Event(), [False]

    def work() -> None:
        while not stop.is_set():
            gate.passed()
            inside[0] = True
            time.sleep(0.002)
            inside[0] = False

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            gate.close(lambda: 1, stop)
            assert not inside[0]
            gate.open()
    finally:
        stop.set()
        gate.open()
        thread.join()


def soaked(out: Path, minutes: str, looks: str, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.soak", "--looks", looks, "--json", str(out), "--minutes", minutes, *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(out.read_text())
    assert data["problems"] == []
    return data


@pytest.mark.req("R-GATE-03")
@pytest.mark.timeout(600)
@pytest.mark.fault(33)
def test_a_few_seconds_of_soak_run_clean(tmp_path: Path) -> None:
    """The real program: its load runs, changes and meets its faults, its breaker opens and closes, no thread fails.

    That nothing grows is for the longer run below and for `make prove NAME=soak` to say. A machine that is too busy to
    do anything in a few seconds is given more of them.
    """
    for minutes in ("0.06", "0.2", "0.6", "2"):
        data = soaked(tmp_path / "soak.json", minutes, "6", "--raises", "0.05")
        happened = data["changes"] > 0 and data["opened"] > 0 and data["closed"] > 0
        if happened and data["calls"] > 100 and len(data["samples"]) >= 3:
            return
    raise AssertionError(f"nothing much happened in two minutes: {data}")


@pytest.mark.req("R-GATE-03")
def test_a_soak_in_which_a_thread_of_the_load_ends_with_an_error_fails(tmp_path: Path) -> None:
    broken = (
        "import sys, tools.soak as soak\n"
        "def work(self, number, counts, stop, gate):\n    gate.passed()\n    raise KeyError('inside')\n"
        "soak.Soak._work = work\n"
        "sys.exit(soak.main(['--minutes', '5', '--looks', '1000', '--json', sys.argv[1]]))\n"
    )
    out = tmp_path / "soak.json"
    done = subprocess.run([sys.executable, "-c", broken, str(out)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(json.loads(out.read_text())["problems"]) == {"KeyError: 'inside'"}


@pytest.mark.slow
@pytest.mark.req("R-GATE-03")
def test_a_minute_of_soak_holds_nothing_more_at_its_end(tmp_path: Path) -> None:
    data = soaked(tmp_path / "soak.json", "1", "30")
    assert data["growth_judged"] and data["calls"] > 1_000
