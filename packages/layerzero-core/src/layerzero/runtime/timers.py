"""The clock's part: a breaker's cooldown ends, a timeboxed policy expires. One daemon timer, armed on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerzero.forking import fresh_lock, in_child

if TYPE_CHECKING:
    from layerzero.runtime.state import Runtime

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

    def at_health_deadline(self, runtime: Runtime) -> None:
        """Arm the tick that lets an open breaker go half-open."""
        deadline = runtime.health.next_deadline()
        if deadline is None:
            self.cancel("health")
            return

        def tick() -> None:
            from layerzero.runtime.half_open import advance

            advance(runtime)
            self.at_health_deadline(runtime)

        self.after("health", deadline - time.monotonic(), tick)

    def ensure_health(self, runtime: Runtime) -> None:
        """Arm that tick unless it is armed or at work: after a fork its thread is gone."""
        timer = self._armed.get("health")
        if timer is None or not timer.is_alive():
            self.at_health_deadline(runtime)

    def forget(self) -> None:
        """In a forked child the timer threads are gone."""
        self._armed = {}


timers = Timers()
in_child(timers.forget)
