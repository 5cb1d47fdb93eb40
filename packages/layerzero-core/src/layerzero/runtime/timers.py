"""The clock's part: a breaker's cooldown ends, a timeboxed policy expires, a call takes too long.

A breaker whose cooldown is over is not handed real calls before `layerzero_health` of its backend has passed. Built-in
backends are asked in this process; others in a process of their own, because a vendor that failed may crash or hang. A
backend without such a hook is half-opened at once, and its next call is the test. Nothing of this runs on the path
of a call: the timer's thread does it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerzero.forking import fresh_lock, in_child
from layerzero.model.kernel import KernelSpec
from layerzero.model.status import HealthReport
from layerzero.reasons import reason
from layerzero.runtime.state import state

if TYPE_CHECKING:
    from layerzero.plugin.manager import PluginRecord

_log = logging.getLogger("layerzero.health")
_one_at_a_time = fresh_lock()
_SLACK_S = 0.005  # fire just after a deadline, so that "now >= deadline" holds when the callback looks


class Timers:
    """Named one-shot callbacks; arming a name again replaces its earlier time."""

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self._armed: dict[str, threading.Timer] = {}

    def after(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback` once, `seconds` from now, unless `name` is armed again or cancelled before."""
        timer = threading.Timer(max(0.0, seconds) + _SLACK_S, callback)
        timer.daemon = True
        timer.name = f"layerzero-{name}"
        with self._lock:
            old = self._armed.pop(name, None)
            self._armed[name] = timer
        if old is not None:
            old.cancel()
        timer.start()

    def cancel(self, name: str) -> None:
        """Forget a name; nothing happens when it was never armed."""
        with self._lock:
            timer = self._armed.pop(name, None)
        if timer is not None:
            timer.cancel()

    def at_health_deadline(self) -> None:
        """Arm the tick that lets an open breaker go half-open."""
        deadline = state.health.next_deadline()
        if deadline is None:
            self.cancel("health")
            return

        def tick() -> None:
            advance()
            self.at_health_deadline()

        self.after("health", deadline - time.monotonic(), tick)

    def ensure_health(self) -> None:
        """Arm that tick unless it is armed or at work: after a fork its thread is gone."""
        timer = self._armed.get("health")
        if timer is None or not timer.is_alive():
            self.at_health_deadline()

    def forget(self) -> None:
        """In a forked child the timer threads are gone."""
        self._armed = {}


timers = Timers()
in_child(timers.forget)


def on_miss() -> bool:
    """On the cold path: half-open what needs no self test; True when that changed the World."""
    health = state.health
    due = health.due()
    plain = [item for item in due if not has_self_test(_backend(*item))]
    if len(plain) < len(due):  # the timer's thread may be gone (a fork) or late: see that one is under way
        timers.ensure_health()
    return bool(plain) and health.tick(only=plain)


def advance() -> bool:
    """Test every backend one of whose breakers may half-open, and move those that pass; True when any moved."""
    health = state.health
    with _one_at_a_time:
        due = health.due()
        passed: list[tuple[str, str]] = []
        told: dict[str, str | None] = {}
        for kind, name in due:
            backend = _backend(kind, name)
            if backend not in told:
                told[backend] = self_test(backend)
            wrong = told[backend]
            if wrong is None:
                passed.append((kind, name))
            else:
                _log.warning("%s %s stays set aside: %s", kind, name, wrong)
                health.rest(kind, name, wrong)
        moved = bool(passed) and health.tick(only=passed)
        for backend, wrong in told.items():
            # For the backend's own breaker a passed self test is a good run; a kernel's next call is its own.
            if wrong is None and ("backend", backend) in passed and has_self_test(backend):
                health.backend_succeeded(backend)
        return moved


def _backend(kind: str, name: str) -> str:
    if kind == "backend":
        return name
    kernel = state.world.registry.kernels.get(name)
    return name.partition(".")[0] if kernel is None else kernel.backend


def _record(backend: str) -> PluginRecord | None:
    return next((item for item in state.records if backend in item.backends), None)


def _plugin(backend: str) -> Any:
    record, manager = _record(backend), state.plugin_manager
    return None if record is None or manager is None else manager.get_plugin(record.name)


def has_self_test(backend: str) -> bool:
    """Whether a backend can be asked, and the policy wants it asked."""
    asked = state.health.snapshot().settings.probe
    return asked and getattr(_plugin(backend), "layerzero_health", None) is not None


def self_test(backend: str) -> str | None:
    """What is wrong with a backend according to its own known-answer test; None when nothing is, or nobody knows."""
    if not has_self_test(backend):
        return None
    limit = state.health.snapshot().settings.probe_timeout_s
    record = _record(backend)
    if record is not None and not record.builtin:
        return _in_own_process(backend, limit)
    return _in_this_process(_plugin(backend), backend, limit)


def _in_this_process(plugin: Any, backend: str, limit: float) -> str | None:
    from layerzero.plugin.manager import call_hook

    said: list[Any] = []

    def ask() -> None:
        try:
            said.append(call_hook(plugin, "layerzero_health", backend=backend))
        except Exception as error:
            said.append(HealthReport(backend, False, f"{type(error).__name__}: {error}"[:400]))

    thread = threading.Thread(target=ask, name="layerzero-self-test", daemon=True)
    thread.start()
    thread.join(limit)
    if not said:
        return str(reason("KERNEL_TIMEOUT", f"the self test of {backend}", limit))
    return _wrong(said[0])


def _in_own_process(backend: str, limit: float) -> str | None:
    from layerzero.isolation.worker import settings_for
    from layerzero.plugin.probing import probe

    world = state.world
    enclosure = settings_for(backend, world).enclosure if backend in world.enclosed else None
    found = probe(backend, limit, enclosure=enclosure)
    if not found.status.available:
        return str(found.status.reasons[0]) if found.status.reasons else "it is not available any more"
    return _wrong(found.health)


def _wrong(said: Any) -> str | None:
    if said is None:
        return None
    if not isinstance(said, HealthReport):
        return str(reason("HEALTH_CHECK_FAILED", f"layerzero_health gave {type(said).__name__}"))
    return None if said.ok else str(reason("HEALTH_CHECK_FAILED", said.detail))


class Watchdog:
    """Calls that take too long: seen, said, and their kernel set aside, while the call itself goes on.

    A thread cannot be stopped from outside, so in this process a hang can only be observed: the kernel's breaker opens
    and other calls go elsewhere, the log names the kernel and the thread, and the crash marker of a process that is
    then killed names it at the next start. A kernel that may hang belongs into a process that can be ended
    (`isolation`). Only where the policy sets `breaker.deadline_s` are calls watched at all; then one costs about a
    microsecond more. One thread looks at the calls under way a few times per deadline while there are any.
    """

    def __init__(self) -> None:
        self._lock = fresh_lock()
        self._under_way: dict[tuple[int, int], tuple[float, float, KernelSpec]] = {}
        self._told: set[tuple[int, int]] = set()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()  # the next one of these is atomic
        self.overdue = 0

    def watched(self, run: Callable[..., Any], kernel: KernelSpec, limit: float) -> Callable[..., Any]:
        clock, me = time.monotonic, threading.get_ident
        under_way, numbers = self._under_way, self._numbers

        def seen(*args: Any) -> Any:
            key = (me(), next(numbers))
            under_way[key] = (clock() + limit, limit, kernel)
            if self._thread is None:
                with self._lock:
                    if self._thread is None:
                        self._thread = threading.Thread(target=self._look, name="layerzero-watchdog", daemon=True)
                        self._thread.start()
            try:
                return run(*args)
            finally:
                under_way.pop(key, None)
                if key in self._told:
                    self._told.discard(key)
                    _log.warning("%s has come back after its deadline of %g s", kernel.kernel_id, limit)

        return seen

    def _look(self) -> None:
        idle = 0
        while idle < 20 or not self._ended():
            now = time.monotonic()
            calls = list(self._under_way.items())
            idle = 0 if calls else idle + 1
            for key, (until, limit, kernel) in calls:
                if now >= until and key not in self._told:
                    self._told.add(key)
                    self.overdue += 1
                    why = reason("KERNEL_TIMEOUT", kernel.kernel_id, limit, detail="the call goes on")
                    _log.error("%s in thread %d: %s", kernel.kernel_id, key[0], why)
                    state.health.kernel_failed(kernel.kernel_id, str(why), kernel.backend)
            shortest = min((limit for _, (_, limit, _) in calls), default=0.2)
            time.sleep(min(0.25, max(0.002, shortest / 4)))

    def _ended(self) -> bool:
        with self._lock:
            self._thread = None  # before the last look: a call that comes after it starts another thread
            if self._under_way:
                self._thread = threading.current_thread()
            return self._thread is None

    def after_fork(self) -> None:
        """The thread and the calls are the parent's."""
        self._under_way.clear()
        self._told.clear()
        self._thread = None


watchdog = Watchdog()
in_child(watchdog.after_fork)
