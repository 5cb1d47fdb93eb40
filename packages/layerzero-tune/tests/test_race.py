"""The timing harness: who is counted, who wins, when it stops."""

from __future__ import annotations

import functools

import pytest
import torch

from layerzero.errors import InvalidInputError
from layerzero.perfdb.measurement import alike, median_error
from layerzero_tune.bench import contest
from layerzero_tune.timing import race as module
from layerzero_tune.timing.race import Times, calls_a_sample, leader, race, winner_of


class Clock:
    """Time that passes only as the contestants say."""

    def __init__(self, monkeypatch):
        self.ns = 0
        monkeypatch.setattr(module.time, "perf_counter_ns", lambda: self.ns)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.ns / 1e9)

    def takes(self, *us):
        calls = iter(lambda: 0, 1)
        state = {"n": 0}

        def call():
            next(calls)
            self.ns += int(us[state["n"] % len(us)] * 1e3)
            state["n"] += 1

        call.state = state
        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.req("R-TUNE-01")
def test_warm_up_is_not_counted(clock):
    state = {"n": 0}

    def call():
        state["n"] += 1
        clock.ns += 1_000_000 if state["n"] <= 5 else 300_000

    found = race({"a": call}, least=4, most=4, warmup=5)
    assert found.times["a"].median_us == 300.0 and found.times["a"].samples == 4
    assert state["n"] == 5 + 2 + 4  # warm-up, finding the batch size, one call a sample


@pytest.mark.req("R-TUNE-02")
def test_the_statistics_are_these():
    found = Times.of([float(n) for n in range(1, 102)])
    assert (found.median_us, found.p95_us, found.p99_us, found.samples) == (51.0, 96.0, 100.0, 101)
    assert found.variance == pytest.approx(850.0)
    with pytest.raises(InvalidInputError):
        Times.of([])


@pytest.mark.req("R-TUNE-03")
def test_the_faster_one_wins_and_a_clear_race_stops_early(clock):
    found = race({"slow": clock.takes(500.0), "fast": clock.takes(250.0)}, least=6, most=100, seconds=1e9)
    assert found.winner == "fast" and found.clear and found.rounds == 6
    assert found.times["slow"].median_us == pytest.approx(2.0 * found.times["fast"].median_us)


def test_inside_the_noise_the_name_decides_and_all_rounds_are_run(clock):
    one, two = clock.takes(300.0, 310.0), clock.takes(301.0, 309.0)
    found = race({"b": one, "a": two}, least=4, most=20, seconds=1e9, noise=0.02)
    assert found.winner == "a" and not found.clear and found.rounds == 20
    assert leader({"reference.x.plain": 100.0, "torch.x.native": 101.0}, 0.02) == "torch.x.native"
    assert leader({"b": 100.0, "a": 103.0}, 0.02) == "b" and leader({"b": 100.0, "a": 101.0}, 0.02) == "a"


def test_a_hopeless_one_leaves_after_the_least_rounds(clock):
    near, far = clock.takes(300.0, 310.0), clock.takes(2000.0)
    other = clock.takes(305.0)
    found = race({"near": near, "far": far, "other": other}, least=5, most=30, seconds=1e9)
    assert found.times["far"].samples == 5 and found.times["near"].samples == 30


def test_on_the_clock_of_a_gpu_who_is_half_behind_leaves_too(clock, monkeypatch):
    kinds = {"near": (300.0, 310.0), "other": (305.0,), "behind": (480.0,)}
    samples = []
    for word in ("cpu_clock", "cuda_clock"):
        monkeypatch.setattr(module, word, module.cpu_clock)
        calls = {name: clock.takes(*us) for name, us in kinds.items()}
        found = race(calls, least=5, most=30, seconds=1e9, clock=module.cpu_clock)
        samples.append(found.times["behind"].samples)
    assert samples == [30, 5]


def test_the_budget_ends_a_race_but_everyone_has_the_least_samples(clock):
    found = race({"a": clock.takes(1e6, 1.01e6), "b": clock.takes(1.01e6, 1e6)}, least=3, most=100, seconds=2.0)
    assert found.rounds == 3 and {t.samples for t in found.times.values()} == {3}


@pytest.mark.req("R-TUNE-03")
def test_drift_hits_everyone_alike(clock):
    speed = {"now": 1.0}

    def drifting(us):
        def call():
            clock.ns += int(us * 1e3 * speed["now"])
            speed["now"] *= 1.01  # the machine gets slower and slower

        return call

    found = race({"a": drifting(300.0), "b": drifting(330.0)}, least=40, most=40, seconds=1e9, warmup=1)
    ratio = found.times["b"].median_us / found.times["a"].median_us
    assert found.winner == "a" and ratio == pytest.approx(1.1, abs=0.03)


def test_real_work_is_timed():
    x = torch.randn(64, 64)
    found = race({"one": lambda: x @ x, "ten": lambda: [x @ x for _ in range(10)]}, least=5, most=30)
    assert found.winner == "one" and found.times["ten"].median_us > found.times["one"].median_us


def test_nobody_is_refused():
    with pytest.raises(InvalidInputError):
        race({})


@pytest.mark.req("R-TUNE-02")
def test_kernels_of_a_few_microseconds_get_three_times_the_rounds(clock):
    short = race({"b": clock.takes(5.0), "a": clock.takes(5.0)}, least=4, most=6, seconds=0.0)
    longer = race({"b": clock.takes(300.0), "a": clock.takes(300.0)}, least=4, most=6, seconds=0.0)
    assert (short.rounds, longer.rounds) == (12, 4) and short.winner == longer.winner == "a"
    many = [race({"a": clock.takes(5.0), "b": clock.takes(5.0)}, least=least, seconds=0.0) for least in (12, 24, 48)]
    assert [found.rounds for found in many] == [36, 36, 48]
    near, far = clock.takes(5.0), clock.takes(50.0)
    found = race({"near": near, "also": clock.takes(5.05), "far": far}, least=4, most=6, seconds=0.0)
    assert found.times["far"].samples == 4 and found.times["near"].samples == 12  # no need to know the far one better


def test_a_sample_on_a_gpu_is_the_median_of_several_calls_and_no_long_stretch():
    assert [calls_a_sample(us, cold=True) for us in (5.0, 136.0, 500.0, 5_000.0)] == [15, 7, 3, 1]
    assert [calls_a_sample(us, cold=False) for us in (0.0, 5.0, 136.0, 5_000.0)] == [1000, 40, 1, 1]


def test_an_unsteady_lead_is_raced_on_until_patience_ends(clock):
    """Samples of 100 to 180 µs say nothing about 140 against 139: more of them do, up to three times the seconds."""

    def contest(*us):
        return {"a": clock.takes(*us), "b": clock.takes(*us[::-1])}

    wild = race(contest(300.0, 500.0, 340.0, 460.0, 380.0), least=5, most=10_000, seconds=0.02)
    calm = race(contest(400.0, 401.0, 400.5, 402.0, 400.2), least=5, most=10_000, seconds=0.02)
    assert not wild.clear and 0.02 < wild.seconds <= 0.065 and calm.seconds <= 0.025
    assert wild.rounds > 2 * calm.rounds


def test_the_noise_band_follows_the_spread_up_to_five_percent():
    def times(us, deviation):
        return Times(us, us, us, deviation**2, 12, deviation**2)

    assert median_error(144.0, 144) == pytest.approx(1.2533)
    assert winner_of({"b": times(100.0, 0.1), "a": times(103.0, 0.1)}, 0.02) == "b"  # steady: three percent count
    assert winner_of({"b": times(100.0, 5.0), "a": times(103.0, 5.0)}, 0.02) == "a"  # they may as well be equal
    assert winner_of({"b": times(100.0, 50.0), "a": times(106.0, 50.0)}, 0.02) == "b"  # no spread excuses six
    assert alike(100.0, 0.0, 102.0, 0.0, 0.02) and not alike(100.0, 0.0, 102.1, 0.0, 0.02)


def test_a_graph_is_captured_several_times_and_its_captures_are_replayed_in_turn(monkeypatch):
    """As on the H200: torch's own product, 40 MB in a cache of 50, took 42 µs in one graph and 46 in the next."""
    placed = iter((42.0, 46.0, 44.0))
    monkeypatch.setattr(contest, "graphed", lambda call: functools.partial(float, next(placed)))
    replay = contest._captured(lambda: None)
    assert [replay() for _ in range(6)] == [42.0, 46.0, 44.0] * 2
    assert contest._replayed(replay, 60) == 44.0
