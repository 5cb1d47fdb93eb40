"""How time is measured here without counters or rights: docs/performance.md, and what `lz bench` really does."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from layerzero_cli.root import cli
from layerzero_tune.bench import contest
from layerzero_tune.timing import host_load
from layerzero_tune.timing.host_load import Pace, pace
from layerzero_tune.timing.race import race
from tests import own_time

_watch: dict[str, list[str] | None] = {"opened": None}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    opened = _watch["opened"]
    if event == "open" and opened is not None:
        opened.append(str(args[0]))


sys.addaudithook(_audit)  # cannot be taken out again; without a list to fill it does nothing


@pytest.mark.req("R-ENV-14")
def test_one_kernel_is_measured_without_counters_and_says_how_steady_it_was() -> None:
    name = "torch.rms_norm.native"
    command = ["bench", "rms_norm", "--shape", "64,256", "--dtype", "fp32", "--device", "cpu", "--kernel", name]
    _watch["opened"] = opened = []
    try:
        result = CliRunner().invoke(cli, [*command, "--seconds", "0.05", "--json"])
    finally:
        _watch["opened"] = None
    assert result.exit_code == 0, result.output
    assert [path for path in opened if re.search("perf_event|/msr$|event_source", path)] == []
    (case,) = json.loads(result.stdout)["cases"]
    assert list(case["kernels"]) == [name], "the benchmark is of that kernel alone"
    kernel = case["kernels"][name]
    assert kernel["samples"] >= 9 and kernel["p95_us"] >= kernel["us"] > 0, "the spread stands beside the median"
    assert set(case["clock"]) == {"before_ns", "after_ns", "steady"} and case["clock"]["before_ns"] > 0
    assert case["torch"]["us"] > 0, "torch ran in the same rounds, so that the ratio holds whatever the clock does"


@pytest.mark.req("R-ENV-14")
def test_a_clock_that_moved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench", "rms_norm", "--shape", "8,32", "--dtype", "fp32", "--device", "cpu", "--seconds", "0.01"]
    for paces, said in (([100, 105], False), ([100, 130], True), ([130, 100], True)):
        turn = iter(paces)
        monkeypatch.setattr(contest, "pace", lambda turn=turn: next(turn))
        result = CliRunner().invoke(cli, [*command, "--kernel", "torch"])
        assert result.exit_code == 0 and ("the host's speed changed by" in result.output) is said, result.output


def test_the_pace_is_the_work_and_not_what_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.accumulate(itertools.cycle([10_000, 0, 90_000, 0, 400_000, 0]), initial=0)
    monkeypatch.setattr(host_load, "time", SimpleNamespace(perf_counter_ns=lambda: next(ticks)))
    assert pace() == 10_000
    assert Pace(100, 110).steady and not Pace(100, 111).steady and not Pace(111, 100).steady
    assert Pace(100, 125).change == 0.25


@pytest.mark.req("R-ENV-14")
@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["quiet", "noisy"])
def test_a_timing_gate_gives_the_same_verdict_each_time_it_is_repeated(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of the test: a quarter of the calls is late by a third, and the machine slows down all the while."""
    own_time.use_own_time(monkeypatch)
    verdicts = set()
    for seed in range(6):
        chance, slower = random.Random(seed), itertools.count()

        def kernel(us: float, chance: Any = chance, slower: Any = slower) -> Any:
            def run() -> None:
                late = noise if chance.random() < 0.25 else 0.0
                own_time.spend(us * 1e-6 * (1 + late) * (1 + next(slower) * 1e-5))

            return run

        found = race({"a": kernel(500.0), "b": kernel(400.0), "c": kernel(405.0)}, seconds=0.2)
        ratio = found.times["a"].median_us / found.times["b"].median_us
        verdicts.add((found.winner, ratio <= 1.10, 1.15 <= ratio <= 1.4))
    assert verdicts == {("b", False, True)}, "the slow one is always outside, and of two that tie the name decides"
