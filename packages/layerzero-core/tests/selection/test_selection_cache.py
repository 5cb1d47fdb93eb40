"""The selection cache: shards, versions, LRU, TTL, and many threads at once; herds are in test_selection_herds.py."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import ConfigurationError
from layerzero.model.context import Context
from layerzero.runtime.state import state
from layerzero.selection.cache import SHARDS, SelectionCache, shard_index
from tools.threads import run_threads


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- shards


@pytest.mark.req("R-CACHE-01")
def test_keys_spread_evenly_over_256_shards() -> None:
    assert SHARDS == 256
    for keys in (
        range(25_600),
        [("attention", batch, seq, "float16") for batch in range(160) for seq in range(128, 20_608, 128)],
        [f"key-{number}" for number in range(25_600)],
    ):
        counts = Counter(shard_index(key) for key in keys)
        assert len(counts) == 256
        assert min(counts.values()) > 50 and max(counts.values()) < 170  # 100 expected in each


@pytest.mark.req("R-CACHE-01")
@given(st.one_of(st.integers(), st.text(), st.tuples(st.text(), st.integers()), st.floats(allow_nan=False)))
def test_a_key_always_has_the_same_shard(key: Any) -> None:
    assert shard_index(key) == shard_index(key)
    assert 0 <= shard_index(key) < 256


@pytest.mark.req("R-CACHE-01")
def test_equal_keys_of_different_types_meet_in_one_shard() -> None:
    assert shard_index(1) == shard_index(1.0) == shard_index(True)
    cache: SelectionCache[Any, str] = SelectionCache()
    cache.put(1, "one")
    assert cache.get(1.0) == "one"


@pytest.mark.req("R-CACHE-01")
@pytest.mark.usefixtures("built_in")
def test_selections_of_the_process_lie_in_256_shards_each_in_its_keys_own() -> None:
    weight = torch.ones(8)
    for rows in range(1, 41):
        lz.select("rms_norm", torch.randn(rows, rows), torch.ones(rows))
        lz.select("rms_norm", torch.randn(rows, 8), weight)
    shards = state.cache._shards
    held = [(place, key) for place, shard in enumerate(shards) for key in shard.entries]
    assert len(shards) == SHARDS and len(held) == len(state.cache) > 40
    assert all(shard_index(key) == place for place, key in held)


@pytest.mark.req("R-CACHE-01")
def test_keys_of_real_calls_spread_evenly() -> None:
    first = Context(op="rms_norm", dims=(("rows", 1), ("hidden", 64)))
    keys = [(first.with_dims(rows=rows), "0123456789abcdef01234567") for rows in range(12_800)]
    counts = Counter(shard_index(key) for key in keys)
    assert len(counts) == 256
    assert min(counts.values()) > 15 and max(counts.values()) < 100  # 50 expected in each


# -- versions


def steps(work: Callable[[], object]) -> int:
    """How many lines and calls, those into C included, a piece of work takes."""
    seen = itertools.count()

    def trace(frame: Any, event: str, value: Any) -> Any:
        next(seen)
        return trace

    before = sys.gettrace(), sys.getprofile()  # a measurement of coverage may be under way
    sys.settrace(trace)
    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return next(seen)


@pytest.mark.req("R-CACHE-02")
@pytest.mark.parametrize("how", ["all", "shard"])
def test_an_invalidation_bumps_one_number_whatever_the_size(how: str) -> None:
    """As many steps for 5 000 entries as for none, and none is touched: they go at the next write of their shard."""
    taken = []
    for size in (0, 5_000):
        cache: SelectionCache[int, int] = SelectionCache(50_000)
        for key in range(size):
            cache.put(key, key)
        place = shard_index(7)
        before = cache.version(place)
        taken.append(steps(cache.invalidate_all if how == "all" else partial(cache.invalidate_shard, place)))
        assert cache.version(place) > before and len(cache) == size
        assert all(cache.get(key) is None for key in range(size) if how == "all" or shard_index(key) == place)
    assert taken[0] == taken[1]


@pytest.mark.req("R-CACHE-02")
def test_invalidate_shard_leaves_the_others() -> None:
    cache: SelectionCache[int, int] = SelectionCache()
    for key in range(1_000):
        cache.put(key, key)
    cache.invalidate_shard(shard_index(5))
    for key in range(1_000):
        assert (cache.get(key) is None) is (shard_index(key) == shard_index(5))


def test_a_key_stored_after_an_invalidation_is_found() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    cache.put("a", 1)
    cache.invalidate_all()
    cache.put("a", 2)
    cache.invalidate_shard(shard_index("a"))
    assert cache.get("a") is None
    cache.put("a", 3)
    assert cache.get("a") == 3 and len(cache) == 1


def test_invalidate_removes_one_key() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.invalidate("a") is True and cache.invalidate("a") is False
    assert (cache.get("a"), cache.get("b"), len(cache)) == (None, 2, 1)


@pytest.mark.req("R-CACHE-03", "R-CACHE-07")
def test_reads_do_not_wait_for_writers() -> None:
    cache: SelectionCache[int, int] = SelectionCache()
    for key in range(300):
        cache.put(key, key)
    cache._book.acquire()
    for shard in cache._shards:
        shard.lock.acquire()
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.extend(cache.get(key) for key in range(301)), daemon=True)
    reader.start()
    reader.join(60)
    assert found == [*range(300), None]


@pytest.mark.req("R-CACHE-03")
def test_a_reader_never_sees_a_value_of_an_invalidated_version() -> None:
    cache: SelectionCache[int, int] = SelectionCache()
    generation, stop = [0], threading.Event()

    def write() -> None:
        for _ in range(1_500):
            generation[0] += 1
            cache.invalidate_all()
            for key in range(4):
                cache.put(key, generation[0])
        stop.set()

    def work(number: int) -> None:
        if number == 0:
            return write()
        while not stop.is_set():
            # Only the writer stores, after it raised the number: older values were invalidated before the read.
            floor = cache.version(0)
            value = cache.get(number % 4)
            assert value is None or value >= floor, "stale"

    run_threads(4, work)


# -- bounds


@pytest.mark.req("R-CACHE-04")
def test_the_least_recently_used_entry_goes_first() -> None:
    cache: SelectionCache[str, int] = SelectionCache(3)
    for number, key in enumerate("abc"):
        cache.put(key, number)
    cache.get("a")
    cache.put("d", 3)
    assert [cache.get(key) for key in "abcd"] == [0, None, 2, 3]
    assert len(cache) == 3 and cache.stats().evictions == 1


@pytest.mark.req("R-CACHE-04")
def test_entries_expire_after_their_time() -> None:
    clock = Clock()
    cache: SelectionCache[str, int] = SelectionCache(ttl_s=10.0, clock=clock)
    cache.put("a", 1)
    clock.now = 9.99
    assert cache.get("a") == 1
    clock.now = 10.0
    assert cache.get("a") is None
    calls: list[int] = []
    assert cache.get_or_compute("a", lambda: calls.append(1) or 2) == 2  # type: ignore[func-returns-value]
    assert calls == [1] and cache.get("a") == 2 and len(cache) == 1
    assert cache.stats().expirations == 1


@pytest.mark.req("R-CACHE-04")
def test_storing_again_renews_the_time() -> None:
    clock = Clock()
    cache: SelectionCache[str, int] = SelectionCache(ttl_s=10.0, clock=clock, shards=1)
    cache.put("a", 1)
    clock.now = 5.0
    cache.put("b", 1)
    clock.now = 6.0
    cache.put("a", 2)
    clock.now = 15.5
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (2, None, 3, 2)


@pytest.mark.req("R-CACHE-09")
def test_size_stays_bounded_over_many_keys_and_invalidations() -> None:
    cache: SelectionCache[int, bytes] = SelectionCache(200)
    for key in range(20_000):
        cache.put(key, b"x")
        assert len(cache) <= 200
        if key % 997 == 0:
            cache.invalidate_all()
    assert sum(len(shard.entries) for shard in cache._shards) == len(cache) <= 200
    assert all(not shard.flights for shard in cache._shards)


@pytest.mark.req("R-CACHE-09")
def test_size_stays_bounded_under_threads() -> None:
    cache: SelectionCache[int, int] = SelectionCache(100)

    def work(number: int) -> None:
        for step in range(400):
            key = number * 1_000 + step
            assert cache.get_or_compute(key, lambda key=key: key) == key  # type: ignore[misc]
            assert len(cache) <= 100 + 8

    run_threads(8, work)
    assert sum(len(shard.entries) for shard in cache._shards) == len(cache) <= 100


def test_a_cache_of_size_zero_stores_nothing_but_still_answers() -> None:
    cache: SelectionCache[str, int] = SelectionCache(0)
    assert [cache.get_or_compute("a", itertools.count().__next__) for _ in range(2)] == [0, 0]
    cache.put("a", 1)
    assert cache.get("a") is None and len(cache) == 0


@pytest.mark.parametrize("wrong", [{"max_entries": -1}, {"shards": 0}, {"ttl_s": 0.0}, {"ttl_s": float("nan")}])
def test_sizes_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SelectionCache(**wrong)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9)),
        st.tuples(st.just("get"), st.integers(0, 9)),
        st.tuples(st.just("compute"), st.integers(0, 9)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
        st.tuples(st.just("shard"), st.integers(0, 3)),
        st.tuples(st.just("all"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 4)),
    ),
    max_size=80,
)


@pytest.mark.req("R-CACHE-02", "R-CACHE-04", "R-CACHE-09")
@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 8), st.sampled_from([None, 5.0]))
def test_any_history_agrees_with_a_plain_dictionary(steps: list[tuple[str, int]], size: int, ttl: float | None) -> None:
    """The model keeps key → (value, time) in order of use. Dead entries are dropped before live ones are evicted."""
    clock, values = Clock(), itertools.count()
    cache: SelectionCache[int, int] = SelectionCache(size, ttl_s=ttl, shards=4, clock=clock)
    model: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def alive(key: int) -> bool:
        return key in model and (ttl is None or clock.now < model[key][1] + ttl)

    def store(key: int, value: int) -> None:
        for dead in [other for other in model if not alive(other)]:
            del model[dead]
        model[key] = (value, clock.now)
        model.move_to_end(key)
        while len(model) > size:
            model.popitem(last=False)

    for step, number in steps:
        if step == "put":
            value = next(values)
            cache.put(number, value)
            store(number, value)
        elif step == "get":
            assert cache.get(number) == (model[number][0] if alive(number) else None)
        elif step == "compute":
            value = next(values)
            expected = model[number][0] if alive(number) else value
            assert cache.get_or_compute(number, lambda value=value: value) == expected  # type: ignore[misc]
            if expected == value:
                store(number, value)
        elif step == "forget":
            cache.invalidate(number)
            model.pop(number, None)
        elif step == "shard":
            cache.invalidate_shard(number)
            for key in [key for key in model if shard_index(key, 4) == number]:
                del model[key]
        elif step == "all":
            cache.invalidate_all()
            model.clear()
        else:
            clock.now += number
        if step in ("get", "compute") and alive(number):
            model.move_to_end(number)
        assert len(cache) <= size
    for key in range(10):
        assert cache.get(key) == (model[key][0] if alive(key) else None)


# -- many threads


@pytest.mark.req("R-CACHE-07", "R-CONC-01", "R-SEL-12")
def test_a_hundred_threads_reading_and_invalidating_see_no_error_and_nothing_stale() -> None:
    """Values carry the world they were computed in; after `world` moved on and was published, no older one may come."""
    cache: SelectionCache[int, tuple[int, int]] = SelectionCache(64)
    world, turn = [0], threading.Lock()
    operations = itertools.count()

    def move_on(shard: int | None) -> None:
        with turn:
            world[0] += 1
            cache.invalidate_all() if shard is None else [cache.invalidate_shard(n) for n in range(SHARDS)]

    published = [0]

    def work(number: int) -> None:
        for step in range(500):
            key = (number * 7 + step * 13) % 90
            floor = published[0]
            if step % 40 == 0 and number % 10 == 0:
                move_on(None if number % 20 else 1)
                with turn:
                    published[0] = max(published[0], world[0])
            elif step % 17 == 0:
                cache.invalidate(key)
            elif step % 3 == 0:
                found = cache.get(key)
                assert found is None or (found[0] == key and found[1] >= floor)
            else:
                value = cache.get_or_compute(key, lambda key=key: (key, world[0]), timeout=100)  # type: ignore[misc]
                assert value[0] == key
                assert value[1] >= floor, "stale"
            next(operations)

    run_threads(100, work)
    assert next(operations) == 50_000
    assert len(cache) <= 64 and all(not shard.flights for shard in cache._shards)


@pytest.mark.req("R-CACHE-07")
def test_ten_thousand_concurrent_writes_lose_nothing() -> None:
    cache: SelectionCache[tuple[int, int], int] = SelectionCache(20_000)

    def work(number: int) -> None:
        for step in range(250):
            cache.put((number, step), number * 1_000 + step)

    run_threads(40, work)
    assert all(cache.get((n, s)) == n * 1_000 + s for n in range(40) for s in range(250))
    assert len(cache) == 10_000


@pytest.mark.req("R-CACHE-07")
def test_hit_counters_are_exact_under_threads() -> None:
    cache: SelectionCache[int, int] = SelectionCache()
    for key in range(10):
        cache.put(key, key)

    def work(number: int) -> None:
        for step in range(1_000):
            cache.get(step % 20)

    run_threads(8, work)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries) == (4_000, 4_000, 10)
    assert cache.stats() == stats and stats.to_json()["hits"] == 4_000


def test_the_cache_works_after_its_locks_were_lost_in_a_fork() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    cache.put("kept", 1)
    started, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: cache.get_or_compute("busy", lambda: (started.set(), go.wait(60), 1)[2]))
    thread.start()
    started.wait(60)
    for shard in cache._shards:
        shard.lock.acquire()
    cache._book.acquire()
    cache._evicting.acquire()
    cache.reinit_after_fork()  # what a child must do: the thread that computes "busy" does not exist there
    assert cache.get_or_compute("busy", lambda: 2, timeout=1) == 2
    assert cache.get("kept") == 1
    go.set()
    thread.join(60)
