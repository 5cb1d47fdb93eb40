"""Scopes belong to one thread or task; Worlds are swapped whole; nobody ever sees half a change or an old choice."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import os
import pkgutil
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import layerzero
import layerzero as lz
from layerzero.health.breaker import HealthRegistry
from layerzero.policy.layers import merge
from layerzero.runtime.state import state
from layerzero.runtime.timers import advance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
X, W = torch.randn(3, 8), torch.ones(8)
A, B, C = (f"s.rms_norm.{name}" for name in "abc")


@pytest.fixture
def three(lab: Any) -> Any:
    lab.use(*(lab.kernel(kernel_id) for kernel_id in (A, B, C)))
    return lab


def winner(lab: Any) -> str:
    _, ran = lab.run(lz.rms_norm, X, W)
    assert ran == [lz.which("rms_norm", X, W)]
    return str(ran[0])


# -- scopes ---------------------------------------------------------------------------------------
@pytest.mark.req("R-API-14")
def test_scopes_nest_and_end(three: Any) -> None:
    assert winner(three) == A
    with lz.prefer(B):
        assert winner(three) == B
        with lz.scoped(deny=[B]):
            assert winner(three) == A
            with lz.prefer(C):
                assert winner(three) == C
            assert winner(three) == A
        assert winner(three) == B
    assert winner(three) == A


@pytest.mark.req("R-API-14")
def test_a_scope_ends_when_an_error_leaves_it(three: Any) -> None:
    with pytest.raises(KeyError), lz.prefer(B):
        raise KeyError
    assert winner(three) == A


@pytest.mark.req("R-POL-02")
def test_a_scope_is_seen_by_its_own_thread_only(three: Any) -> None:
    seen: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        seen["other"] = winner(three)
        with lz.prefer(C):
            seen["own"] = winner(three)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with lz.prefer(B):
        assert winner(three) == B
        inside.set()
        done.wait()
        assert winner(three) == B
    thread.join()
    assert seen == {"other": A, "own": C}


def test_tasks_keep_their_own_scopes_across_awaits(three: Any) -> None:
    async def work(kernel_id: str | None) -> list[str]:
        found = []
        if kernel_id is None:
            for _ in range(5):
                found.append(winner(three))
                await asyncio.sleep(0.001)
            return found
        with lz.prefer(kernel_id):
            for _ in range(5):
                found.append(winner(three))
                await asyncio.sleep(0.001)
        return found

    async def main() -> list[list[str]]:
        return await asyncio.gather(work(B), work(None), work(C), work(B))

    assert asyncio.run(main()) == [[B] * 5, [A] * 5, [C] * 5, [B] * 5]


def test_a_task_started_in_a_scope_inherits_it(three: Any) -> None:
    async def child() -> str:
        await asyncio.sleep(0)
        return winner(three)

    async def main() -> tuple[str, str]:
        with lz.prefer(B):
            task = asyncio.create_task(child())
        return await task, winner(three)

    assert asyncio.run(main()) == (B, A)


def test_a_context_may_be_carried_into_a_thread_and_shared_by_several(three: Any) -> None:
    with lz.prefer(C):
        carried = [contextvars.copy_context() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda context: context.run(winner, three), carried))
    assert found == [C] * 4
    assert winner(three) == A


def test_a_scope_follows_a_swap_of_the_base_world(three: Any) -> None:
    with lz.prefer(B):
        assert winner(three) == B
        lz.configure(deny=[B])
        assert winner(three) == A
        state.health.kernel_failed(A, "broken")
        assert winner(three) == C
        state.health.reset()
        lz.configure(deny=[])
        assert winner(three) == B
        state.publish(registry=state.world.registry.without(kernels=[B]))
        assert winner(three) == A
    assert winner(three) == A


def test_a_scope_is_as_hot_as_the_base(three: Any) -> None:
    with lz.prefer(B):
        winner(three)
        misses, swaps = state.counters.misses, state.counters.swaps
        for _ in range(20):
            lz.rms_norm(X, W)
        assert state.counters.misses == misses
        assert state.counters.swaps == swaps


# -- swaps ----------------------------------------------------------------------------------------
@pytest.mark.req("R-POL-12", "R-CACHE-03")
def test_a_change_is_in_force_when_the_call_that_made_it_returns(three: Any) -> None:
    for _ in range(30):
        for kernel_id in (A, B, C):
            lz.lock("rms_norm", kernel_id)
            assert three.run(lz.rms_norm, X, W)[1] == [kernel_id]
            assert three.run(lz.rms_norm, X, W)[1] == [kernel_id]


@pytest.mark.req("R-CACHE-07")
def test_a_choice_that_was_made_before_waits_for_no_lock(three: Any) -> None:
    """While another thread holds every lock of the runtime: calls that are hot, and selections that are kept."""
    lz.rms_norm(X, W)
    kept = lz.select("rms_norm", X, W)
    with contextlib.ExitStack() as stack:
        for lock in (state._lock, state.health._lock, state.cache._book, state.cache._evicting):
            stack.enter_context(lock)
        for shard in state.cache._shards:
            stack.enter_context(shard.lock)
        found: list[Any] = []
        made = threading.Thread(
            target=lambda: found.extend((three.run(lz.rms_norm, X, W)[1], lz.select("rms_norm", X, W))), daemon=True
        )
        made.start()
        made.join(20)
    assert found == [[A], kept]


def test_loading_from_many_threads_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_ON_FIRST_USE", "off")  # what a check finds out is a new world, too
    lz.reset()
    loads: list[Any] = []
    original = state.load

    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        lz.rms_norm(X, W)
        loads.append(state.world)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert original == state.load
    assert state.counters.swaps == 1
    assert len({id(item) for item in loads}) == 1
    lz.reset()


def mixed_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    q = torch.randn(1, 2, 4, 8)
    ids = torch.tensor([0, 1])
    return [
        *((lz.rms_norm, (torch.randn(rows, 8), W)) for rows in (1, 2, 5, 9)),
        *((lz.attention, (q, torch.randn(1, 2, s, 8), torch.randn(1, 2, s, 8))) for s in (3, 4, 9, 17)),
        (lz.silu_and_mul, (torch.randn(2, 8),)),
        (lz.embedding, (ids, torch.randn(4, 3))),
    ]


def hammer(lab: Any, threads: int, calls: int, least_swaps: int) -> list[int]:
    """Many threads call, one swaps policies and breaks and heals kernels, until there were enough of both.

    Returns the calls each thread made.
    """
    work = mixed_calls()
    wanted = [function(*args) for function, args in work]
    problems: list[BaseException] = []
    made = [0] * threads
    stop, shaken = threading.Event(), threading.Event()
    # The kernel that is denied now and was denied for the whole of a call: it must not have run.
    denied: list[tuple[str, int]] = [("", 0)]
    begun = threading.Barrier(threads + 1)

    def call(index: int) -> None:
        rng = random.Random(index)
        me = threading.get_ident()
        try:
            begun.wait()
            while (made[index] < calls or not shaken.is_set()) and not stop.is_set():
                number = rng.randrange(len(work))
                function, args = work[number]
                before = denied[0]
                mark = len(lab.calls)
                out = function(*args)
                ran = [kernel_id for kernel_id, ident in lab.calls[mark:] if ident == me]
                assert ran, "no kernel ran"
                if denied[0] is before and before[0]:
                    assert before[0] not in ran, f"{before[0]} was denied before the call began and ran"
                torch.testing.assert_close(out, wanted[number], rtol=1e-4, atol=1e-5)
                made[index] += 1
        except BaseException as error:
            problems.append(error)
            stop.set()

    pool = [threading.Thread(target=call, args=(index,)) for index in range(threads)]
    for thread in pool:
        thread.start()
    begun.wait()
    rng = random.Random(1)
    swaps = 0
    names = [A, B, "t.attention.a", "sdpa.attention.flash_cpu"]
    while any(thread.is_alive() for thread in pool):
        choice = rng.random()
        name = rng.choice(names)
        if choice < 0.6:
            denied[0] = ("", swaps)
            lz.configure(deny=[name])
            denied[0] = (name, swaps)
        elif choice < 0.8:
            state.health.kernel_failed(rng.choice(names), "shaken")
        elif choice < 0.9:
            state.health.reset()
        else:
            state.cache.invalidate_all()
        swaps += 1
        if swaps >= least_swaps:
            shaken.set()
        time.sleep(0.001)
    for thread in pool:
        thread.join()
    if problems:
        raise problems[0]
    return made


@pytest.mark.req("R-CONC-01", "R-CACHE-03")
def test_many_threads_and_many_swaps_give_no_error_and_no_stale_choice(lab: Any) -> None:
    lab.use(*(lab.kernel(kernel_id, priority=60) for kernel_id in (A, B)), lab.kernel("t.attention.a", priority=70))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        made = hammer(lab, threads=20, calls=150, least_swaps=20)
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 20 and min(made) >= 150


@pytest.mark.stress
@pytest.mark.req("R-CONC-01", "R-CACHE-07", "R-SEL-12")
def test_hundred_threads_times_ten_thousand_lookups(lab: Any) -> None:
    lab.use(*(lab.kernel(kernel_id, priority=60) for kernel_id in (A, B)), lab.kernel("t.attention.a", priority=70))
    work = mixed_calls()
    lookups = 10_000 if PROVE else 100
    counts = [0] * 100
    problems: list[BaseException] = []
    shaken = threading.Event()

    def look(index: int) -> None:
        rng = random.Random(index)
        try:
            for number in range(lookups):
                if number == lookups - 1:  # nobody is done before there were enough swaps, however slow the machine is
                    shaken.wait()
                function, args = rng.choice(work)
                function(*args)
                counts[index] += 1
        except BaseException as error:
            problems.append(error)

    pool = [threading.Thread(target=look, args=(index,)) for index in range(100)]
    for thread in pool:
        thread.start()
    swaps = 0
    while any(thread.is_alive() for thread in pool):
        lz.configure(deny=[random.choice((A, B, "t.attention.a"))])
        now = lz.get_config().deny[0]
        assert lab.run(lz.rms_norm, X, W)[1] != [now]
        swaps += 1
        if swaps > 5:
            shaken.set()
        if len(lab.calls) > 100_000:
            lab.clear()
        time.sleep(0.02)
    for thread in pool:
        thread.join()
    assert not problems
    assert sum(counts) == 100 * lookups
    assert swaps > 5


@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_goes_on_with_the_same_choices(three: Any) -> None:
    lz.rms_norm(X, W)
    lz.configure(prefer=[C])
    assert winner(three) == C
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = winner(three)
            lz.configure(prefer=[B])
            found += " " + winner(three)
            state.health.kernel_failed(B, "broken")
            found += " " + winner(three)
            os.write(write, found.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        assert pipe.read() == f"{C} {B} {A}"
    assert winner(three) == C


@pytest.mark.req("R-CONC-03", "R-POL-11")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_timebox_ends_in_a_forked_child_too(three: Any) -> None:
    """The thread of the clock stays with the parent, and hot calls look at no clock."""
    first = winner(three)
    lz.configure(prefer=[C], expires_in=0.5)
    assert winner(three) == C != first
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            while winner(three) == C:
                time.sleep(0.01)
            code = 0 if winner(three) == first else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("busy_with", ["a policy", "a lock", "a swap", "a self test"])
def test_a_child_forked_while_another_thread_changes_something_is_not_held_up(
    three: Any, monkeypatch: pytest.MonkeyPatch, busy_with: str
) -> None:
    """The thread that holds the locks does not exist in the child, and never gives them back there."""
    winner(three)
    begun, forked, due = threading.Event(), threading.Event(), HealthRegistry.due

    def pause() -> None:
        if threading.current_thread().name == "busy":
            begun.set()
            assert forked.wait(100)

    def merge_slowly(*args: Any, **kwargs: Any) -> Any:
        pause()
        return merge(*args, **kwargs)

    def look_slowly(*args: Any, **kwargs: Any) -> Any:
        pause()
        return due(*args, **kwargs)

    def swap() -> None:
        with state.changing():
            pause()

    monkeypatch.setattr("layerzero.runtime.policies.merge", merge_slowly)
    monkeypatch.setattr(HealthRegistry, "due", look_slowly)
    changes = {
        "a policy": lambda: lz.configure(avoid=[A]), "a lock": lambda: lz.lock("rms_norm", A), "a swap": swap,
        "a self test": advance,
    }  # fmt: skip
    busy = threading.Thread(target=changes[busy_with], name="busy", daemon=True)
    busy.start()
    assert begun.wait(100)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)  # a child that waits for ever is ended
            lz.unlock()
            lz.configure(avoid=[], prefer=[B])
            assert winner(three) == B
            with lz.prefer(C):
                assert lz.get_config().prefer == (C, B)
                assert winner(three) == C
            assert not advance()  # no breaker is open
            code = 0
        finally:
            os._exit(code)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    busy.join(100)
    assert not busy.is_alive()


def test_what_ran_in_one_scope_is_not_told_of_another():
    x = torch.randn(3, 48)
    lz.rms_norm(x)
    usual = lz.explain("rms_norm", x).ran
    with lz.scoped(allow=["reference*"]):
        assert lz.explain("rms_norm", x).ran is None
        lz.rms_norm(x)
        assert lz.explain("rms_norm", x).ran == "reference.rms_norm.plain"
    assert lz.explain("rms_norm", x).ran == usual != "reference.rms_norm.plain"


@pytest.mark.req("R-CONC-03")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_no_lock_of_a_module_is_held_in_a_forked_child() -> None:
    """Locks that live as long as the process, whichever thread holds them when it forks."""
    for found in pkgutil.walk_packages(layerzero.__path__, "layerzero."):
        importlib.import_module(found.name)
    kinds = type(threading.Lock()), type(threading.RLock())
    locks = {
        f"{module.__name__}.{name}": value
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if getattr(module, "__name__", "").split(".")[0] == "layerzero" and isinstance(value, kinds)
    }
    assert len(locks) > 8
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in {id(lock): lock for lock in locks.values()}.values():
                stack.enter_context(lock)
            held.set()
            forked.wait(100)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(100)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            os.write(tell, " ".join(name for name, lock in locks.items() if not lock.acquire(timeout=0.1)).encode())
        finally:
            os._exit(0)
    os.close(tell)
    forked.set()
    os.waitpid(pid, 0)
    thread.join(100)
    with os.fdopen(told) as lines:
        assert lines.read() == ""
