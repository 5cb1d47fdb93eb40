"""Calls that take too long: seen, said, and their kernel set aside, while the call itself goes on.

A thread cannot be stopped from outside, so in this process a hang can only be observed: the kernel's breaker opens and
other calls go elsewhere, the log names the kernel and the thread, and the crash marker of a process that is then
killed names it at the next start. A kernel that may hang belongs into a process that can be ended (`isolation`).
Only where the policy sets `breaker.deadline_s` are calls watched at all; then one costs about a microsecond more.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from layerzero.forking import fresh_lock, in_child
from layerzero.model.kernel import KernelSpec
from layerzero.reasons import reason
from layerzero.runtime.state import state

_log = logging.getLogger("layerzero.health")


class Watchdog:
    """Calls under way by thread. One thread looks at them a few times per deadline while there are any."""

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
                self._begin()
            try:
                return run(*args)
            finally:
                under_way.pop(key, None)
                if key in self._told:
                    self._told.discard(key)
                    _log.warning("%s has come back after its deadline of %g s", kernel.kernel_id, limit)

        return seen

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="layerzero-watchdog", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        idle = 0
        while idle < 20:
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
        with self._lock:
            self._thread = None

    def after_fork(self) -> None:
        """The thread and the calls are the parent's."""
        self._under_way.clear()
        self._told.clear()
        self._thread = None


watchdog = Watchdog()
in_child(watchdog.after_fork)
