"""One call in several places of memory: how many copies, who moves, and that everybody is timed in all of them."""

from __future__ import annotations

import time

import pytest
import torch

from layerzero_tune.candidates import _as_steady, _spread
from layerzero_tune.timing.allocations import Places
from layerzero_tune.timing.clock import Clock
from layerzero_tune.timing.launches import with_launches
from layerzero_tune.timing.race import Times, over_time, race, winner_of

ROWS = torch.zeros(256)  # 1 KiB


def made() -> tuple[object, ...]:
    return (ROWS.clone(), [ROWS.clone(), None], 1e-6)


@pytest.mark.parametrize(("kib", "copies"), [(0, 1), (7, 1), (8, 2), (17, 4), (1000, 6)])
def test_as_many_copies_as_there_is_room_for_with_their_results(kib: int, copies: int) -> None:
    assert len(Places(made, kib * 1024)) == copies


def test_a_storage_shared_by_arguments_counts_once() -> None:
    def views() -> tuple[torch.Tensor, torch.Tensor]:
        held = ROWS.clone()
        return held, held[:16]

    assert len(Places(views, 4 * 1024)) == 2


def test_everybody_moves_together_and_results_do_not_come_to_lie_in_one_place() -> None:
    places = Places(made, 1e9)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def kernel(name: str):
        def run(x: torch.Tensor, *rest: object) -> torch.Tensor:
            seen[name].append(x.data_ptr())
            return x + 1

        return run

    steps = {name: places.step(kernel(name)) for name in seen}
    for _ in range(12):
        places.move()
        for step in steps.values():
            step()
    assert seen["a"] == seen["b"] and len(set(seen["a"])) == 6
    assert seen["a"][:6] == seen["a"][6:] and len(set(seen["a"][:6])) == 6
    held = {result.data_ptr() for result in places._results}
    assert len(held) == 5


def test_one_place_needs_no_moving() -> None:
    places = Places(made)
    step = places.step(lambda x, *rest: x.data_ptr())
    first = step()
    places.move()
    assert step() == first and len(places) == 1


class Placed:
    """A clock whose kernels take as long as their place says: one is faster in half of the places."""

    def __init__(self, places: list[int]) -> None:
        self.now, self.places = 0, places

    def move(self) -> None:
        self.now = (self.now + 1) % len(self.places)

    def clock(self) -> Clock:
        return lambda call, count: call()

    def takes(self, *us: float):
        return lambda: us[self.now]


@pytest.mark.req("R-TUNE-03")
def test_the_place_of_the_first_copy_does_not_decide_the_race() -> None:
    """`a` is 4 % ahead where the first copy lies and 2 % behind in the other five: whoever stays there is misled."""
    world = Placed([0, 1, 2, 3, 4, 5])
    contest = {"a": world.takes(96.0, *[102.0] * 5), "b": world.takes(*[100.0] * 6)}
    stays = race(contest, least=24, most=24, seconds=0.0, clock=world.clock())
    moves = race(contest, least=24, most=24, seconds=0.0, clock=world.clock(), each_round=world.move)
    assert winner_of(stays.times, 0.015) == "a" and winner_of(moves.times, 0.015) == "b"
    assert moves.times["a"].median_us == 102.0


@pytest.mark.req("R-TUNE-03")
def test_launches_are_timed_in_every_place_and_close_ones_once_more_alone() -> None:
    """Six kernels in a turn disturb each other's launches; of two that are close the second look counts."""
    world, turns = Placed([0, 1, 2]), []
    took = {"a": 20.0, "b": 22.0, "c": 90.0}

    def clock(call, count):
        turns.append(call())
        return (
            took[call()] if len(set(turns)) == 3 and turns.count("c") < 15 else {"a": 21.0, "b": 20.0}.get(call(), 90.0)
        )

    calls = {name: (lambda name=name: name) for name in took}
    times = {name: Times(5.0, 5.0, 5.0, 0.0, 36) for name in took}
    moves: list[int] = []
    found = with_launches(times, calls, clock, lambda: 1.0, each_turn=lambda: (moves.append(1), world.move())[0])
    assert (found["a"].median_us, found["b"].median_us, found["c"].median_us) == (21.0, 20.0, 90.0)
    assert turns.count("c") == 15 and turns.count("a") == turns.count("b") == 75 and len(moves) == 75


@pytest.mark.req("R-TUNE-03")
def test_how_a_shared_machine_is_most_of_the_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` is ahead while the machine is quick, one second in four, and then behind `b`, which is as quick as ever."""
    clock = Placed([0, 1, 1, 1])

    def takes(*us: float):
        def call() -> None:
            end = time.perf_counter_ns() + us[clock.places[clock.now]] * 1e3
            while time.perf_counter_ns() < end:
                pass

        return call

    calls = {"a": takes(380.0, 480.0), "b": takes(400.0, 400.0), "far": takes(900.0, 900.0)}
    first = {name: Times(us, us, us, 0.0, 12, 1.0) for name, us in (("a", 380.0), ("b", 400.0), ("far", 900.0))}
    pauses: list[float] = []
    monkeypatch.setattr("layerzero_tune.timing.race._keep_busy", lambda who, s: (pauses.append(s), clock.move())[0])
    found = _spread(first, calls, 0.2)
    assert winner_of(first, 0.015) == "a" and winner_of(found, 0.015) == "b" and found["far"] is first["far"]
    assert len(pauses) == 40 and sum(pauses) == pytest.approx(0.6)
    # They are at least as steady as before: that the machine has two speeds is none of theirs.
    assert found["b"].steady ** 0.5 / found["b"].median_us <= 1.0 / 400.0 + 1e-9
    alone = {"b": first["b"], "far": first["far"]}
    assert _spread(alone, calls, 0.2) is alone and len(pauses) == 40


@pytest.mark.req("R-TUNE-03")
def test_a_fastest_kernel_that_was_unsteady_races_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` is a quarter ahead and was disturbed: with those two of its spreads behind it is timed again, steady now."""

    def takes(us: float):
        def call() -> None:
            end = time.perf_counter_ns() + us * 1e3
            while time.perf_counter_ns() < end:
                pass

        return call

    calls = {"a": takes(287.0), "b": takes(370.0), "c": takes(600.0)}
    monkeypatch.setattr("layerzero_tune.timing.race._keep_busy", lambda who, seconds: None)

    def first(spread: float) -> dict[str, Times]:
        others = {name: Times(us, us, us, 0.0, 12) for name, us in (("b", 370.0), ("c", 600.0))}
        return {"a": Times(287.0, 500.0, 500.0, 0.0, 12, (spread * 287.0) ** 2), **others}

    rough, calm = first(0.19), first(0.05)
    found = _spread(rough, calls, 0.2)
    assert found["a"].samples == found["b"].samples == 40 and found["c"] is rough["c"]
    assert found["a"].steady < rough["a"].steady / 4
    assert _spread(calm, calls, 0.2) is calm


def test_the_machine_is_kept_busy_between_the_rounds() -> None:
    """By everybody, for as long as the pause is, and untimed: there are as many samples as rounds."""
    counts = {"a": 0, "b": 0}

    def takes(name: str):
        def call() -> None:
            counts[name] += 1
            end = time.perf_counter_ns() + 20_000
            while time.perf_counter_ns() < end:
                pass

        return call

    begin = time.perf_counter()
    found = over_time({name: takes(name) for name in counts}, 0.2, 4)
    assert time.perf_counter() - begin >= 0.2
    assert {item.samples for item in found.times.values()} == {4} and min(counts.values()) > 4 * 300


def test_a_kernel_is_as_steady_as_in_the_look_where_it_was_steadier() -> None:
    """A machine adds to the spread of a kernel, now in one look, now in the other."""
    rough, calm = Times(100.0, 140.0, 150.0, 400.0, 12, 324.0), Times(110.0, 115.0, 116.0, 9.0, 40, 4.0)
    assert _as_steady(calm, rough) == calm
    told = _as_steady(rough, calm)
    assert (told.median_us, told.samples) == (100.0, 12)
    assert told.variance**0.5 / 100.0 == pytest.approx(3.0 / 110.0) and told.steady**0.5 == pytest.approx(200.0 / 110.0)


def test_what_all_have_in_common_in_a_round_is_no_spread_of_theirs() -> None:
    world = Placed([0, 1, 2, 3])
    contest = {"a": world.takes(100.0, 150.0, 120.0, 180.0), "b": world.takes(110.0, 165.0, 132.0, 198.0)}
    found = race(contest, rounds=24, seconds=0.0, clock=world.clock(), each_round=world.move)
    loose = race(contest, least=24, most=24, seconds=0.0, clock=world.clock(), each_round=world.move)
    assert found.rounds == 24 and found.times["a"].samples == found.times["b"].samples == 24
    assert found.times["a"].steady < 1e-9 < loose.times["a"].steady
    assert found.times["b"].median_us / found.times["a"].median_us == pytest.approx(1.1)
