"""A choice in C lives and dies with its World: swaps, scopes, threads, recording, faults, and no World kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from contextvars import copy_context
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.hot import HOT_LIMIT
from layerzero.errors import KernelExecutionError
from layerzero.recording.tally import Tally
from layerzero.runtime.current import now
from layerzero.runtime.state import state

X, W = torch.randn(2, 8), torch.ones(8)
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
PLAIN = "reference.rms_norm.plain"


def chosen(*args: Any) -> str:
    """Which kernel a call of rms_norm really runs, told by the bound kernels themselves."""
    ran: list[str] = []
    lz.rms_norm(*args)
    bounds = {id(bound): bound for bound in state.world.hot.values()}.values()
    saved = [(bound, bound.run) for bound in bounds]
    for bound, run in saved:
        bound.run = lambda *given, bound=bound, run=run: (ran.append(bound.kernel_id), run(*given))[1]
    try:
        lz.rms_norm(*args)
    finally:
        for bound, run in saved:
            bound.run = run
    return ran[0]


@pytest.mark.req("R-CACHE-06")
def test_a_lock_is_obeyed_at_the_very_next_call(fresh: Any) -> None:
    usual = chosen(X, W)
    assert usual != PLAIN
    for _ in range(3):
        lz.lock("rms_norm", PLAIN)
        assert chosen(X, W) == PLAIN
        lz.unlock("rms_norm")
        assert chosen(X, W) == usual


def test_a_scope_has_its_own_choices_and_finds_them_in_c(fresh: Any) -> None:
    usual = chosen(X, W)
    with lz.disabled():
        world = now.world
        for _ in range(3):
            lz.rms_norm(X, W)
        before = fresh.counts()["exact"]
        for _ in range(5):
            lz.rms_norm(X, W)
        assert fresh.counts()["exact"] == before + 5
        assert now.world is world  # a scope is a World of its own, not a swap
        assert lz.which("rms_norm", X, W) == PLAIN
    assert chosen(X, W) == usual


def test_a_scope_belongs_to_its_context(fresh: Any) -> None:
    for _ in range(3):
        lz.rms_norm(X, W)
    inside, manager = copy_context(), lz.disabled()
    inside.run(manager.__enter__)
    mine, size, x = state.world.hot, len(state.world.hot), torch.randn(5, 8)
    for _ in range(3):
        inside.run(lz.rms_norm, x, W)
    assert len(mine) == size  # the choice went into the scope's own World
    lz.rms_norm(x, W)
    assert len(mine) == size + 1
    inside.run(manager.__exit__, None, None, None)


def test_while_calls_are_recorded_each_is_counted(fresh: Any) -> None:
    for _ in range(3):
        lz.rms_norm(X, W)
    tally = Tally()
    state.record(tally)
    try:
        for _ in range(10):
            lz.rms_norm(X, W)
    finally:
        state.record(None)
    assert [count for count, _ in tally.counts().values()] == [10]
    before = fresh.counts()["exact"]
    for _ in range(4):
        lz.rms_norm(X, W)
    assert fresh.counts()["exact"] == before + 3


def test_emptying_the_table_of_the_world_empties_the_one_in_c(fresh: Any) -> None:
    for _ in range(4):
        lz.rms_norm(X, W)
    misses, dropped = state.counters.misses, fresh.counts()["dropped"]
    state.world.hot.clear()
    lz.rms_norm(X, W)
    assert (state.counters.misses, fresh.counts()["dropped"]) == (misses + 1, dropped + 1)


@pytest.mark.stress
@pytest.mark.req("R-CACHE-09")
def test_more_keys_than_the_limit_start_afresh_and_stay_right(fresh: Any) -> None:
    w, x = torch.full((2,), 3.0), torch.randn(1, 2)
    lz.rms_norm(x, w)
    dropped = fresh.counts()["dropped"]
    for rows in range(1, HOT_LIMIT + 500):
        lz.rms_norm(torch.empty(rows, 0, 2), w)  # nothing to compute
        assert len(state.world.hot) <= HOT_LIMIT
    assert len(state.world.hot) < 1000
    assert fresh.counts()["dropped"] <= dropped + 1  # or, with the same count of keys, by C's own limit
    assert torch.equal(lz.rms_norm(x, w), PUBLIC["rms_norm"].function(x, w))


def test_a_world_that_was_replaced_is_not_kept_alive(fresh: Any) -> None:
    for _ in range(4):
        lz.rms_norm(X, W)
        lz.attention(Q, K, K)
    gone = weakref.ref(state.world)
    lz.configure(deny=["nobody.*"])
    gc.collect()
    assert gone() is None


def test_a_kernel_that_raises_is_failed_over_from_c(fresh: Any) -> None:
    for _ in range(4):
        lz.rms_norm(X, W)
    (bound,) = {id(b): b for b in state.world.hot.values() if b.decision.op == "rms_norm"}.values()

    def broken(*args: Any) -> Any:
        raise ArithmeticError("planted")

    bound.run = broken
    before, exact = state.counters.failovers, fresh.counts()["exact"]
    out = lz.rms_norm(X, W)
    assert fresh.counts()["exact"] == exact + 1
    assert state.counters.failovers == before + 1
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(X, (8,), W, 1e-6))


def test_a_locked_kernel_that_raises_says_so_with_its_cause(fresh: Any) -> None:
    lz.lock("rms_norm", PLAIN)
    for _ in range(4):
        lz.rms_norm(X, W)
    for bound in state.world.hot.values():

        def broken(*args: Any) -> Any:
            raise ArithmeticError("planted")

        bound.run = broken
    with pytest.raises(KernelExecutionError, match="locked to") as raised:
        lz.rms_norm(X, W)
    assert isinstance(raised.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through_untouched(fresh: Any, error: type[BaseException]) -> None:
    for _ in range(4):
        lz.rms_norm(X, W)

    def stop(*args: Any) -> Any:
        raise error

    for bound in state.world.hot.values():
        bound.run = stop
    failovers = state.counters.failovers
    with pytest.raises(error):
        lz.rms_norm(X, W)
    assert state.counters.failovers == failovers


def test_a_guard_that_does_not_hold_sends_the_call_to_python(fresh: Any) -> None:
    for _ in range(4):
        lz.rms_norm(X, W)
    asked: list[int] = []
    for bound in state.world.hot.values():
        bound.guard = lambda: bool(asked.append(1))
    misses = state.counters.misses
    lz.rms_norm(X, W)
    assert asked and state.counters.misses == misses + 1


def test_a_call_that_reshapes_its_input_teaches_nothing(fresh: Any) -> None:
    x = torch.randn(2, 8)
    lz.rms_norm(X, W)
    bound = next(b for b in state.world.hot.values() if b.decision.op == "rms_norm")
    run = bound.run

    def reshaping(*args: Any) -> Any:
        out = run(*args)
        args[0].resize_(4, 4)
        return out

    bound.run = reshaping
    learnt = fresh.counts()["learnt"]
    lz.rms_norm(x, W)
    bound.run = run
    assert x.shape == (4, 4)
    assert fresh.counts()["learnt"] == learnt


def test_a_decode_loop_is_found_by_bucket_and_counted_as_in_python(fresh: Any) -> None:
    q = torch.randn(1, 2, 1, 8)
    lengths = range(3, 60)
    lz.attention(q, K, K)
    state.counters.reset()
    before = fresh.counts()
    for n in lengths:
        k = torch.randn(1, 2, n, 8)
        assert torch.equal(lz.attention(q, k, k), PUBLIC["attention"].function(q, k, k))
    after = fresh.counts()
    assert after["bucketed"] - before["bucketed"] > 40
    assert state.counters.selections < 8
    assert state.counters.to_json()["bucketed_hits"] >= after["bucketed"] - before["bucketed"]


@pytest.mark.req("R-CONC-01")
def test_threads_under_swaps_never_meet_a_stale_choice(fresh: Any) -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    expected = {rows: PUBLIC["rms_norm"].function(torch.ones(rows, 8), W) for rows in range(1, 9)}

    def work(seed: int) -> None:
        try:
            for i in range(300):
                rows = (i * 7 + seed) % 8 + 1
                torch.testing.assert_close(lz.rms_norm(torch.ones(rows, 8), W), expected[rows])
        except BaseException as error:
            errors.append(error)

    def swap() -> None:
        while not stop.is_set():
            lz.lock("rms_norm", PLAIN)
            if lz.which("rms_norm", X, W) != PLAIN:
                errors.append(AssertionError("stale"))
            lz.unlock("rms_norm")

    swapper = threading.Thread(target=swap)
    workers = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    swapper.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    swapper.join()
    assert not errors
