"""Circuit breakers: the pure state machine, and the registry that holds one per kernel and backend."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.errors import ConfigurationError
from layerzero.health.breaker import (
    BreakerPhase,
    BreakerSettings,
    BreakerState,
    Health,
    HealthRegistry,
    HealthStatus,
    on_failure,
    on_success,
    tick,
)

CLOSED, OPEN, HALF_OPEN = BreakerPhase.CLOSED, BreakerPhase.OPEN, BreakerPhase.HALF_OPEN
KERNEL = "fake.attention.fast"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def registry(clock: Clock, **kwargs: Any) -> HealthRegistry:
    return HealthRegistry(BreakerSettings(**kwargs), clock=clock)


# -- the state machine


@pytest.mark.req("R-HLTH-02", "R-REG-03")
def test_closed_opens_after_n_failures_then_half_opens_then_closes() -> None:
    rules = BreakerSettings(failures=3, cooldown_s=10.0, successes=2)
    state = BreakerState()
    for count in (1, 2):
        state = on_failure(state, 0.0, rules, "boom")
        assert (state.phase, state.failures) == (CLOSED, count)
    state = on_failure(state, 5.0, rules, "boom 3")
    assert (state.phase, state.opened_at, state.last_error, state.blocks) == (OPEN, 5.0, "boom 3", True)
    assert tick(state, 14.999, rules) is state
    state = tick(state, 15.0, rules)
    assert state.phase is HALF_OPEN and not state.blocks
    state = on_success(state, 16.0, rules)
    assert (state.phase, state.successes) == (HALF_OPEN, 1)
    assert on_success(state, 17.0, rules) == BreakerState()


@pytest.mark.req("R-HLTH-02", "R-REG-03")
def test_a_failed_probe_reopens_for_a_whole_cooldown() -> None:
    rules = BreakerSettings(failures=5, cooldown_s=10.0)
    state = on_failure(BreakerState(HALF_OPEN, failures=1, opened_at=0.0), 50.0, rules, "again")
    assert (state.phase, state.opened_at) == (OPEN, 50.0)
    assert tick(state, 59.0, rules).phase is OPEN
    assert tick(state, 60.0, rules).phase is HALF_OPEN


@pytest.mark.req("R-HLTH-01")
def test_success_resets_the_failure_counter() -> None:
    rules = BreakerSettings(failures=2)
    state = on_failure(BreakerState(), 0.0, rules)
    state = on_success(state, 1.0, rules)
    assert state.failures == 0
    assert on_failure(state, 2.0, rules).phase is CLOSED


@pytest.mark.req("R-HLTH-01")
def test_status_goes_from_healthy_over_degraded_to_unhealthy_and_back() -> None:
    rules = BreakerSettings(failures=2, cooldown_s=1.0)
    state = BreakerState()
    seen = [state.status]
    for step in (
        lambda s: on_failure(s, 0.0, rules), lambda s: on_failure(s, 0.0, rules), lambda s: tick(s, 1.0, rules),
        lambda s: on_success(s, 1.0, rules),
    ):  # fmt: skip
        state = step(state)
        seen.append(state.status)
    assert seen == ["healthy", "degraded", "unhealthy", "degraded", "healthy"]


def test_calls_that_end_while_open_change_nothing_but_the_count() -> None:
    rules = BreakerSettings(cooldown_s=10.0)
    state = on_failure(BreakerState(), 0.0, rules, "first")
    assert on_success(state, 1.0, rules) is state
    late = on_failure(state, 2.0, rules, "late")
    assert (late.phase, late.opened_at, late.failures) == (OPEN, 0.0, 2)


def test_a_disabled_breaker_counts_but_never_opens() -> None:
    rules = BreakerSettings(enabled=False)
    state = BreakerState()
    for _ in range(5):
        state = on_failure(state, 0.0, rules)
    assert (state.phase, state.failures) == (CLOSED, 5)


@pytest.mark.parametrize(
    "wrong", [{"failures": 0}, {"successes": 0}, {"cooldown_s": -1.0}, {"cooldown_s": float("nan")}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        BreakerSettings(**wrong)


class Model:
    """The machine once more, written as plainly as possible: what the frozen one must agree with."""

    def __init__(self, failures: int, cooldown: int, successes: int) -> None:
        self.limit, self.cooldown, self.needed = failures, cooldown, successes
        self.phase, self.bad, self.good, self.since = "closed", 0, 0, 0

    def fail(self, now: int) -> None:
        self.bad += 1
        if self.phase == "half_open" or (self.phase == "closed" and self.bad >= self.limit):
            self.phase, self.since = "open", now

    def succeed(self) -> None:
        if self.phase == "half_open":
            self.good += 1
            if self.good < self.needed:
                return
        if self.phase != "open":
            self.phase, self.bad, self.good = "closed", 0, 0

    def tick(self, now: int) -> None:
        if self.phase == "open" and now - self.since >= self.cooldown:
            self.phase, self.good = "half_open", 0


EVENTS = st.lists(st.one_of(st.sampled_from(["fail", "succeed", "tick"]), st.integers(0, 6)), max_size=60)
LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(1, 3))


@pytest.mark.req("R-HLTH-02")
@settings(max_examples=300, deadline=None)
@given(LIMITS, EVENTS)
def test_any_history_agrees_with_the_model(limits: tuple[int, int, int], events: list[str | int]) -> None:
    model = Model(*limits)
    rules = BreakerSettings(failures=limits[0], cooldown_s=float(limits[1]), successes=limits[2])
    state, now = BreakerState(), 0
    for event in events:
        if isinstance(event, int):
            now += event
        elif event == "fail":
            model.fail(now)
            state = on_failure(state, float(now), rules)
        elif event == "succeed":
            model.succeed()
            state = on_success(state, float(now), rules)
        else:
            model.tick(now)
            state = tick(state, float(now), rules)
        assert (state.phase.value, state.failures) == (model.phase, model.bad)


@settings(max_examples=150, deadline=None)
@given(LIMITS, EVENTS)
def test_calls_through_the_breaker_agree_with_pybreaker(limits: tuple[int, int, int], events: list[str | int]) -> None:
    pybreaker = pytest.importorskip("pybreaker")
    now = 0

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now, tz=UTC)

    def run(fails: bool) -> None:
        if fails:
            raise ValueError

    def allowed(fails: bool) -> bool:
        """Whether the call went through, in pybreaker's view."""
        try:
            peer.call(run, fails)
        except pybreaker.CircuitBreakerError:
            return ran[0]
        except ValueError:
            pass
        return True

    peer = pybreaker.CircuitBreaker(fail_max=limits[0], reset_timeout=limits[1], success_threshold=limits[2])
    ran = [False]
    run_inner = run

    def run(fails: bool) -> None:  # type: ignore[no-redef]
        ran[0] = True
        run_inner(fails)

    rules = BreakerSettings(failures=limits[0], cooldown_s=float(limits[1]), successes=limits[2])
    state = BreakerState()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pybreaker, "datetime", Frozen)
        for event in events:
            if isinstance(event, int):
                now += event
            elif event != "tick":
                ran[0] = False
                went = allowed(event == "fail")
                state = tick(state, float(now), rules)
                assert went is not state.blocks
                if went:
                    state = (
                        on_failure(state, float(now), rules)
                        if event == "fail"
                        else on_success(state, float(now), rules)
                    )
                assert peer.current_state.replace("-", "_") == state.phase.value


# -- the registry


@pytest.mark.req("R-HLTH-02", "R-REG-03")
def test_a_kernel_is_disabled_after_n_failures_and_enabled_after_the_cooldown(clock: Clock) -> None:
    health = registry(clock, failures=2, cooldown_s=30.0)
    health.kernel_failed(KERNEL, RuntimeError("boom"))
    assert not health.snapshot().blocks(KERNEL)
    health.kernel_failed(KERNEL, RuntimeError("boom"))
    blocked = health.snapshot().blocked_by(KERNEL)
    assert blocked is not None and blocked.code == "CIRCUIT_OPEN"
    assert (blocked.value, blocked.limit) == ("RuntimeError: boom", 30.0)
    assert health.next_deadline() == clock.now + 30.0
    clock.now += 29.9
    assert health.tick() is False
    clock.now += 0.1
    assert health.tick() is True
    now = health.snapshot()
    assert not now.blocks(KERNEL) and now.watches(KERNEL) and health.next_deadline() is None
    health.kernel_succeeded(KERNEL)
    assert health.snapshot().status(KERNEL) is HealthStatus.HEALTHY
    assert dict(health.snapshot().kernels) == {}


@pytest.mark.req("R-HLTH-01")
def test_a_kernels_status_is_that_of_its_breaker_or_of_its_backends(clock: Clock) -> None:
    health = registry(clock, failures=2, cooldown_s=30.0)
    seen = []
    for step in (
        lambda: None, lambda: health.kernel_failed(KERNEL), lambda: health.kernel_failed(KERNEL),
        lambda: setattr(clock, "now", clock.now + 30.0), lambda: health.kernel_succeeded(KERNEL),
        lambda: health.kernel_failed(KERNEL), lambda: health.kernel_succeeded(KERNEL),
    ):  # fmt: skip
        step()
        health.tick()
        found = health.snapshot()
        seen.append((found.status(KERNEL).value, found.state(KERNEL).failures))
    assert seen == [
        ("healthy", 0), ("degraded", 1), ("unhealthy", 2), ("degraded", 2), ("healthy", 0), ("degraded", 1),
        ("healthy", 0),
    ]  # fmt: skip
    health.configure(BreakerSettings(failures=1))
    health.backend_failed("fake")
    assert health.snapshot().status(KERNEL) is HealthStatus.UNHEALTHY, "its backend is set aside"


def test_a_failed_backend_blocks_all_its_kernels_and_no_other(clock: Clock) -> None:
    health = registry(clock)
    health.backend_failed("fake", "self test failed")
    now = health.snapshot()
    reason = now.blocked_by(KERNEL)
    assert reason is not None and "backend fake" in reason.message
    assert now.blocks("mylib.norm.x", backend="fake")
    assert not now.blocks("other.attention.fast") and not now.blocks(KERNEL, backend="other")
    clock.now += 30.0
    health.tick()
    health.backend_succeeded("fake")
    assert health.snapshot().status(KERNEL) is HealthStatus.HEALTHY


def test_quarantine_blocks_whatever_the_breaker_says(clock: Clock) -> None:
    health = registry(clock)
    health.set_quarantined({KERNEL: "DEVICE_LOST: illegal memory access"})
    reason = health.snapshot().blocked_by(KERNEL)
    assert reason is not None and reason.code == "QUARANTINED" and "illegal memory access" in reason.message
    version = health.snapshot().version
    health.set_quarantined({KERNEL: "DEVICE_LOST: illegal memory access"})
    assert health.snapshot().version == version
    health.reset()
    assert health.snapshot().blocks(KERNEL)
    health.set_quarantined({})
    assert not health.snapshot().blocks(KERNEL)


def test_fingerprint_depends_only_on_what_is_blocked(clock: Clock) -> None:
    health = registry(clock, failures=2)
    healthy = health.snapshot().fingerprint
    health.kernel_failed(KERNEL, "one")
    assert health.snapshot().fingerprint == healthy
    health.kernel_failed(KERNEL, "two")
    opened = health.snapshot().fingerprint
    health.kernel_failed(KERNEL, "three")
    assert opened != healthy and health.snapshot().fingerprint == opened
    clock.now += 30.0
    health.tick()
    assert health.snapshot().fingerprint == healthy
    other = registry(clock)
    other.kernel_failed(KERNEL, "elsewhere")
    assert other.snapshot().fingerprint == opened
    backend = registry(clock)
    backend.backend_failed(KERNEL)
    assert backend.snapshot().fingerprint not in (opened, healthy)


def test_a_snapshot_does_not_change_afterwards(clock: Clock) -> None:
    health = registry(clock)
    before = health.snapshot()
    health.kernel_failed(KERNEL)
    assert not before.blocks(KERNEL) and health.snapshot().blocks(KERNEL)
    with pytest.raises(TypeError):
        before.kernels["x"] = BreakerState()  # type: ignore[index]


def test_listeners_hear_visible_changes_and_only_those(clock: Clock) -> None:
    health = registry(clock, failures=3, cooldown_s=5.0)
    heard: list[Health] = []
    stop = health.subscribe(heard.append)
    health.kernel_failed(KERNEL)  # healthy → degraded
    health.kernel_failed(KERNEL)  # degraded still
    assert len(heard) == 1
    health.kernel_failed(KERNEL)  # open
    clock.now += 5.0
    health.tick()  # half-open
    health.kernel_succeeded(KERNEL)  # closed
    health.kernel_succeeded(KERNEL)  # nothing new
    assert [state.version for state in heard] == [1, 2, 3, 4]
    assert [state.blocks(KERNEL) for state in heard] == [False, True, False, False]
    stop()
    health.kernel_failed(KERNEL)
    assert len(heard) == 4


def test_a_raising_listener_costs_nobody_else(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    health = registry(clock)
    heard: list[Health] = []

    def bad(_: Health) -> None:
        raise RuntimeError("listener")

    health.subscribe(bad)
    health.subscribe(heard.append)
    assert health.kernel_failed(KERNEL).blocks
    assert len(heard) == 1 and "a health listener raised" in caplog.text


def test_a_listener_may_ask_the_book(clock: Clock) -> None:
    health = registry(clock)
    seen: list[bool] = []
    health.subscribe(lambda _: seen.append(health.snapshot().blocks(KERNEL)))
    health.kernel_failed(KERNEL)
    assert seen == [True]


def test_next_deadline_is_the_earliest_and_never_in_the_past(clock: Clock) -> None:
    health = registry(clock, cooldown_s=10.0)
    health.kernel_failed("a.b.c")
    clock.now += 4.0
    health.backend_failed("d")
    assert health.next_deadline() == 110.0
    clock.now = 200.0
    assert health.next_deadline() == 200.0


def test_new_settings_reach_open_breakers(clock: Clock) -> None:
    health = registry(clock, cooldown_s=1000.0)
    health.kernel_failed(KERNEL)
    health.configure(BreakerSettings(cooldown_s=1.0))
    clock.now += 1.0
    assert health.tick()


def test_reset_forgets_one_name_or_all(clock: Clock) -> None:
    health = registry(clock)
    for name in ("a.b.c", "d.e.f"):
        health.kernel_failed(name)
    health.reset("a.b.c")
    assert not health.snapshot().blocks("a.b.c") and health.snapshot().blocks("d.e.f")
    health.reset()
    assert not health.snapshot().blocks("d.e.f")


@pytest.mark.req("R-HLTH-01")
def test_concurrent_failures_are_all_counted() -> None:
    health = HealthRegistry(BreakerSettings(failures=10_000))
    start = threading.Barrier(8)

    def fail() -> None:
        start.wait()
        for _ in range(500):
            health.kernel_failed(KERNEL)

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert health.snapshot().state(KERNEL).failures == 4_000


def test_the_book_works_after_its_lock_was_lost_in_a_fork(clock: Clock) -> None:
    health = registry(clock)
    health._lock.acquire()
    health.reinit_after_fork()
    assert health.kernel_failed(KERNEL).blocks


def test_states_are_readable_as_json(clock: Clock) -> None:
    health = registry(clock)
    state = health.kernel_failed(KERNEL, ValueError("bad"))
    assert state.to_json() == {
        "phase": "open", "status": "unhealthy", "failures": 1, "successes": 0, "last_error": "ValueError: bad",
    }  # fmt: skip
