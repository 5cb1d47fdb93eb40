"""The selection cache under herds: many threads ask for one new key, one computes, the others wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import SelectionTimeoutError
from layerzero.runtime.state import state
from layerzero.selection.cache import SelectionCache, shard_index
from layerzero.selection.world import Measurements
from tools.threads import run_threads, wait_until


def invalidate(cache: SelectionCache[str, str], how: str) -> None:
    """Everything, the shard of "key", or "key" alone."""
    if how == "all":
        cache.invalidate_all()
    elif how == "shard":
        cache.invalidate_shard(shard_index("key"))
    else:
        cache.invalidate("key")


@pytest.mark.req("R-CACHE-05")
def test_one_thread_computes_and_the_others_receive_its_result() -> None:
    cache: SelectionCache[str, object] = SelectionCache()
    go, calls = threading.Event(), []

    def compute() -> object:
        calls.append(threading.get_ident())
        go.wait(60)
        return object()

    results: list[object] = []

    def work(number: int) -> None:
        if number == 20:
            wait_until(lambda: cache.stats().waits == 19)
            go.set()
        else:
            results.append(cache.get_or_compute("key", compute))

    run_threads(21, work)
    assert len(calls) == 1 and len(results) == 20 and len(set(map(id, results))) == 1
    assert cache.get("key") is results[0]
    assert (cache.stats().computes, cache.stats().misses) == (1, 20)


@pytest.mark.req("R-CACHE-05")
def test_of_many_threads_with_one_new_call_one_selects_and_all_run_what_it_chose(lab: Any) -> None:
    """Calls of ops: the measurement that the selection asks for comes only once every other thread waits for it."""
    x, weight = torch.randn(3, 8), torch.ones(8)
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    asked: list[int] = []

    def late(kernel_id: str, ctx: Any) -> float:
        asked.append(threading.get_ident())
        wait_until(lambda: state.cache.stats().waits == before.waits + 11)
        return 1.0

    state.publish(measurements=Measurements(late, "made up"))
    lab.clear()
    before, selections = state.cache.stats(), state.counters.selections
    run_threads(12, lambda number: lz.rms_norm(x, weight))
    assert state.counters.selections == selections + 1 and len(set(asked)) == 1
    assert lab.ran() == ["mine.rms_norm.a"] * 12


@pytest.mark.req("R-CACHE-05")
def test_an_exception_reaches_every_waiter_and_nothing_is_cached() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    go, caught, calls = threading.Event(), [], []

    def compute() -> int:
        calls.append(1)
        go.wait(60)
        raise ValueError("no kernel")

    def work(number: int) -> None:
        if number == 8:
            wait_until(lambda: cache.stats().waits == 7)
            go.set()
            return
        with pytest.raises(ValueError, match="no kernel") as error:
            cache.get_or_compute("key", compute)
        caught.append(error.value)

    run_threads(9, work)
    assert len(caught) == 8 and len(set(map(id, caught))) == 1 and len(calls) == 1
    assert cache.get("key") is None and len(cache) == 0
    assert cache.get_or_compute("key", lambda: 5) == 5


def test_an_interrupt_stays_in_its_thread_and_a_waiter_takes_over() -> None:
    cache: SelectionCache[str, str] = SelectionCache()
    go, results = threading.Event(), []

    def interrupted() -> str:
        wait_until(lambda: cache.stats().waits == 1)
        raise KeyboardInterrupt

    def work(number: int) -> None:
        if number == 0:
            with pytest.raises(KeyboardInterrupt):
                cache.get_or_compute("key", lambda: (go.set(), interrupted())[1])
        else:
            go.wait(60)
            results.append(cache.get_or_compute("key", lambda: "second"))

    run_threads(2, work)
    assert results == ["second"]


@pytest.mark.req("R-EXC-08")
def test_a_waiter_gives_up_after_its_timeout_and_the_computation_goes_on() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    started, go = threading.Event(), threading.Event()

    def compute() -> int:
        started.set()
        go.wait(60)
        return 7

    def work(number: int) -> None:
        if number == 0:
            assert cache.get_or_compute("key", compute, timeout=0.001) == 7
            return
        started.wait(60)
        with pytest.raises(SelectionTimeoutError) as caught:
            cache.get_or_compute("key", compute, timeout=0.02)
        assert caught.value.code == "SELECTION_TIMEOUT" and caught.value.reasons[0].limit == 0.02
        go.set()

    run_threads(2, work)
    assert cache.get("key") == 7


@pytest.mark.req("R-CACHE-05")
@pytest.mark.parametrize("how", ["all", "shard", "key"])
def test_a_result_computed_before_an_invalidation_is_neither_stored_nor_shared_after_it(how: str) -> None:
    cache: SelectionCache[str, str] = SelectionCache()
    started, go, late = threading.Event(), threading.Event(), []

    def old() -> str:
        started.set()
        go.wait(60)
        return "old"

    def work(number: int) -> None:
        if number == 0:
            assert cache.get_or_compute("key", old) == "old"  # asked before: the answer of then
            return
        started.wait(60)
        invalidate(cache, how)
        late.append(cache.get_or_compute("key", lambda: "new"))  # must not wait for the old computation
        go.set()

    run_threads(2, work)
    assert late == ["new"] and cache.get("key") == "new"
    assert cache.stats().discarded == 1
    assert all(not shard.flights for shard in cache._shards)


@pytest.mark.req("R-CACHE-05")
@pytest.mark.parametrize("how", ["all", "shard", "key"])
def test_an_invalidation_during_a_computation_keeps_its_result_out(how: str) -> None:
    cache: SelectionCache[str, str] = SelectionCache()

    def compute() -> str:
        invalidate(cache, how)
        return "old"

    assert cache.get_or_compute("key", compute) == "old"
    assert cache.get("key") is None and len(cache) == 0


def test_a_computation_that_asks_for_its_own_key_does_not_wait_for_itself() -> None:
    cache: SelectionCache[str, int] = SelectionCache()
    assert cache.get_or_compute("key", lambda: cache.get_or_compute("key", lambda: 1) + 1) == 2


def test_none_is_a_value_for_waiters() -> None:
    cache: SelectionCache[str, None] = SelectionCache()
    go = threading.Event()

    def work(number: int) -> None:
        if number == 2:
            wait_until(lambda: cache.stats().waits == 1)
            go.set()
        else:
            assert cache.get_or_compute("key", lambda: go.wait(60) and None) is None

    run_threads(3, work)
    assert cache.stats().computes == 1
