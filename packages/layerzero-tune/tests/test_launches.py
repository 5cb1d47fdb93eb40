"""What a launch costs the host: who is charged for it, on which core it is timed, and which launches are the same."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager

import pytest

from layerzero.measurements.believed import NOISE
from layerzero_tune.timing import launches
from layerzero_tune.timing.host_load import quick_core
from layerzero_tune.timing.launches import with_launch, with_launches
from layerzero_tune.timing.race import Times, winner_of


@pytest.mark.req("R-TUNE-01")
def test_a_kernel_shorter_than_its_launch_takes_as_long_as_the_launch():
    """A kernel of 4 µs behind a launch of 90 is no fast kernel; some interruptions do not make a launch long."""
    launch = {"eager": [90.0], "quick": [500.0, 700.0, 9.0], "long": [900.0]}
    calls = {name: (lambda name=name: name) for name in launch}
    times = {name: Times(us, us + 1, us + 2, 0.0, 36) for name, us in (("eager", 4.0), ("quick", 5.0), ("long", 500.0))}

    def clock(call, count):
        told = launch[call()]
        return told.pop(0) if len(told) > 1 else told[0]

    found = with_launches(times, calls, clock, lambda: 1.0)
    assert (found["eager"].median_us, found["eager"].p99_us) == (90.0, 92.0)
    assert found["quick"].median_us == 9.0 and found["long"] == times["long"]
    assert winner_of(times, 0.02) == "eager" and winner_of(found, 0.02) == "quick"
    assert with_launch(4.0, lambda: "eager", clock, lambda: 1.0) == 90.0
    assert with_launch(500.0, lambda: "long", clock, lambda: 1.0) == 500.0


def test_those_that_are_held_against_each_other_are_timed_beside_each_other():
    """Far behind the first, one would be timed among all and the other among few; what is in a turn is in its time."""
    launch, company = {"first": 10.0, "torch": 20.0, "call": 24.0, "other": 90.0}, []
    calls = {name: (lambda name=name: name) for name in launch}
    times = {name: Times(4.0, 4.0, 4.0, 0.0, 36) for name in launch}

    def clock(call, count):
        company.append(call())
        return launch[call()]

    found = with_launches(times, calls, clock, lambda: 1.0, together=("torch", "call", "absent"))
    assert found["torch"].samples == found["call"].samples == found["first"].samples > found["other"].samples
    assert {name for name in company if company.count(name) == found["call"].samples + found["other"].samples} == {
        "first", "torch", "call",
    }  # fmt: skip
    alone = with_launches(times, calls, clock, lambda: 1.0)
    assert alone["call"].samples == alone["other"].samples == found["other"].samples


@pytest.mark.req("R-TUNE-03")
def test_no_kernel_pays_for_coming_first():
    """Whoever is timed first finds the host's caches full of something else; kernels that are alike stay alike."""
    seen, warm = [], [None]

    def clock(call, count):
        seen.append(warm[0])
        return 20.0 if warm[0] == call() else 30.0

    def make(name):
        def run():
            warm[0] = name
            return name

        return run

    def pacer():
        warm[0] = None
        return 1.0

    calls = {name: make(name) for name in ("a", "b", "c")}
    times = {name: Times(5.0, 5.0, 5.0, 0.0, 36) for name in calls}
    found = with_launches(times, calls, clock, pacer)
    assert {item.median_us for item in found.values()} == {20.0} and None not in seen
    assert {seen[turn * 3] for turn in range(15)} == {"a", "b", "c"}  # each begins now and then
    unsteady = itertools.cycle([20.0, 26.0, 23.0])
    spread = with_launches({"a": times["a"]}, {"a": calls["a"]}, lambda call, count: next(unsteady), lambda: 1.0)["a"]
    assert (spread.median_us, spread.samples) == (23.0, 15) and spread.steady > 1.0


@pytest.mark.req("R-TUNE-01", "R-TUNE-03")
def test_a_host_that_is_slower_for_a_while_does_not_decide_a_race():
    """Launches of 20 and 30 µs on a host that is up to twice as slow; both kernels take 25 µs on the device."""
    paces = itertools.cycle([1.0, 2.0, 1.5, 1.0, 1.3])
    now = [1.0]
    took = {"a": 30.0, "b": 20.0}

    def pacer():
        now[0] = next(paces)
        return now[0]

    calls = {name: (lambda name=name: name) for name in took}
    times = {name: Times(25.0, 26.0, 27.0, 0.0, 36) for name in took}
    quick = with_launches(times, calls, lambda call, count: took[call()], lambda: 1.0)
    slow = with_launches(times, calls, lambda call, count: took[call()] * 2.0, lambda: 2.0)  # all the while
    assert quick == slow and {name: item.median_us for name, item in slow.items()} == {"a": 30.0, "b": 25.0}
    found = with_launches(times, calls, lambda call, count: took[call()] * now[0], pacer)
    assert found["b"].median_us == 25.0 and 25.0 < found["a"].median_us < 36.0


@pytest.mark.req("R-TUNE-03")
def test_what_slows_all_launches_of_a_turn_is_no_spread_of_theirs():
    """A host up to 1.8 times slower, which the fixed work does not show; one kernel has an unsteadiness of its own."""
    took = {"a": 9.0, "b": 10.0, "c": 12.0, "own": 11.0}
    turns = itertools.count()
    own = itertools.cycle([1.0, 1.3, 1.0, 0.8])

    def clock(call, count):
        slow = (1.0, 1.8, 1.4, 1.1, 1.7)[next(turns) // len(took) % 5]
        name = call()
        return took[name] * slow * (next(own) if name == "own" else 1.0)

    calls = {name: (lambda name=name: name) for name in took}
    times = {name: Times(4.0, 4.0, 4.0, 0.0, 36) for name in took}
    found = with_launches(times, calls, clock, lambda: 1.0)
    assert found["b"].median_us / found["a"].median_us == pytest.approx(10.0 / 9.0)
    assert found["a"].steady < 1e-9 < found["own"].steady and found["own"].steady ** 0.5 > 0.05 * 11.0
    assert found["own"].p95_us > 1.2 * found["own"].median_us  # as its launches were
    assert winner_of(found, 0.0125) == "a"


@pytest.mark.req("R-TUNE-03")
def test_of_launches_that_another_process_would_order_otherwise_the_device_decides():
    """Of 10.0, 10.3, 10.4 and 10.8 µs all but the last; a kernel that its launch does not hold up keeps its time."""
    took = {"a": 10.4, "b": 10.0, "c": 10.3, "far": 10.8, "device": 9.0}
    done = {"a": 4.02, "b": 5.0, "c": 4.0, "far": 3.0, "device": 10.1}
    calls = {name: (lambda name=name: name) for name in took}
    times = {name: Times(us, us, us, 0.0, 36) for name, us in done.items()}
    found = with_launches(times, calls, lambda call, count: took[call()], lambda: 1.0, same=0.06)
    assert {name: item.median_us for name, item in found.items()} == {
        "a": 10.0, "c": 10.0, "b": pytest.approx(10.2), "far": 10.8, "device": 10.1,
    }  # fmt: skip
    assert winner_of(found, 0.0125) == "a"
    raw = with_launches(times, calls, lambda call, count: took[call()], lambda: 1.0)
    assert raw["a"].median_us == 10.4 and raw["device"] == times["device"]


@pytest.mark.req("R-TUNE-03")
def test_unsteady_launches_do_not_undo_what_the_device_decided():
    """Two launches of 10 µs, now longer, now shorter: the kernel that is done later loses, whatever its name."""
    jitter = {"a": itertools.cycle([9.0, 11.0, 10.0]), "b": itertools.cycle([11.0, 10.0, 9.0, 10.0])}
    done = {"a": 5.0, "b": 4.0}
    calls = {name: (lambda name=name: name) for name in done}
    times = {name: Times(us, us, us, 0.0, 36, 0.0004) for name, us in done.items()}
    found = with_launches(times, calls, lambda call, count: next(jitter[call()]), lambda: 1.0, same=0.06)
    assert found["a"].median_us == pytest.approx(1.02 * found["b"].median_us)
    assert found["a"].variance > 0.05  # as it was seen
    assert winner_of(found, NOISE) == "b"


@pytest.mark.req("R-TUNE-03")
def test_launches_that_are_close_are_timed_in_several_looks(monkeypatch):
    """Each look has a mood of its own that lasts all through it: a is up to a tenth slower than b in one of them, and
    the other way round in another. Over all of them the two are the same; c, far behind, is not asked again."""
    looks, asked = [0], {"a": 0, "b": 0, "c": 0}
    moods = {"a": (1.0, 1.0, 1.1, 1.0, 0.95), "b": (1.0, 1.1, 1.0, 0.95, 1.0), "c": (2.0,) * 5}

    @contextmanager
    def core():
        looks[0] += 1
        yield 0

    monkeypatch.setattr(launches, "quick_core", core)

    def clock(call, count):
        name = call()
        asked[name] += 1
        return 10.0 * moods[name][looks[0] - 1]

    calls = {name: (lambda name=name: name) for name in moods}
    times = {name: Times(4.0, 4.0, 4.0, 0.0, 36) for name in moods}
    found = with_launches(times, calls, clock, lambda: 1.0)
    assert looks[0] == 5 and asked == {"a": 75, "b": 75, "c": 15}
    assert found["a"].median_us == pytest.approx(found["b"].median_us, rel=0.03) and found["c"].median_us == 20.0
    looks[0] = 2
    once = with_launches({"a": times["a"]}, {"a": calls["a"]}, clock, lambda: 1.0)  # alone: the third mood, as it is
    assert looks[0] == 3 and once["a"].median_us == pytest.approx(11.0)


def test_the_host_is_timed_on_its_quickest_core():
    """Every core is tried, the thread stays on the quickest, and afterwards may run wherever it might before."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads cannot be bound to cores here")
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    tried = []

    def now():
        (core,) = os.sched_getaffinity(0)
        tried.append(core)
        return 100 if core == max(before) else 180

    def fails():
        with quick_core(now) as core:
            assert core == max(before) and os.sched_getaffinity(0) == {core}
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert os.sched_getaffinity(0) == before and tried == sorted(before)[: len(tried)]
    with quick_core() as core:
        assert os.sched_getaffinity(0) == {core} and core in before
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_may_not_move_stays(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("threads cannot be bound to cores here")

    def refused(pid, cores):
        raise PermissionError

    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", refused)
    with quick_core(lambda: 1) as core:
        assert core is None and os.sched_getaffinity(0) == before


def test_a_choice_that_loses_to_torch_races_again_once_on_a_gpu_and_twice_where_asked():
    from layerzero_cli.calls import context
    from layerzero_tune.trial import _tries

    gpu, cpu = (context("rms_norm", {"shape": (1, 64), "dtype": "float32", "device": d}) for d in ("h200", "cpu"))
    assert (_tries(gpu, False), _tries(gpu, True), _tries(cpu, False)) == (2, 3, 3)
