"""Circuit breakers: closed → open after N failures → half-open after a cooldown → closed, or open again.

The state machine is a handful of pure functions over a frozen `BreakerState`; time comes in as an argument.
`HealthRegistry` holds the states, `Health` is the snapshot that selection reads.

User errors, interrupts and errors during capture are not failures of a kernel; the caller must not report them here.
A backend has a breaker of its own. It opens when something of the backend as a whole fails (`backend_failed`), and
when so many of its kernels are set aside at once that the backend must be ill; it closes by a passed self test or a
good call of any of its kernels.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from layerzero.json_form import Plain
from layerzero.model.config import BreakerSettings
from layerzero.reasons import Reason, ReasonCode, reason


class BreakerPhase(enum.StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class HealthStatus(enum.StrEnum):
    """The same, in the words of a health page."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class BreakerState(Plain):
    """One breaker. `failures` counts since the last success, `successes` since it became half-open."""

    phase: BreakerPhase = BreakerPhase.CLOSED
    failures: int = 0
    successes: int = 0
    opened_at: float | None = None
    last_error: str = ""
    _unshown: ClassVar = ("opened_at",)  # a clock value, which means nothing outside the process

    @property
    def blocks(self) -> bool:
        return self.phase is BreakerPhase.OPEN

    @property
    def watched(self) -> bool:
        """Whether a success would change the state: only then need dispatch report one."""
        return self.phase is BreakerPhase.HALF_OPEN or self.failures > 0

    @property
    def status(self) -> HealthStatus:
        """Healthy, degraded (failed lately, or half-open) or unhealthy (open)."""
        if self.phase is BreakerPhase.OPEN:
            return HealthStatus.UNHEALTHY
        return HealthStatus.DEGRADED if self.watched else HealthStatus.HEALTHY

    def to_json(self) -> dict[str, Any]:
        return Plain.to_json(self) | {"status": self.status.value}


_FRESH = BreakerState()


def on_failure(state: BreakerState, now: float, settings: BreakerSettings, error: str = "") -> BreakerState:
    """The state after a failed call. A failure while half-open reopens; while open it only adds to the count."""
    failed = replace(state, failures=state.failures + 1, last_error=error)
    if state.phase is BreakerPhase.OPEN or not settings.enabled:
        return failed
    if state.phase is BreakerPhase.HALF_OPEN or failed.failures >= settings.failures:
        return replace(failed, phase=BreakerPhase.OPEN, opened_at=now, successes=0)
    return failed


def on_success(state: BreakerState, now: float, settings: BreakerSettings) -> BreakerState:
    """The state after a good call. While open it changes nothing: such a call began before the breaker opened."""
    if state.phase is BreakerPhase.OPEN:
        return state
    if state.phase is BreakerPhase.HALF_OPEN and state.successes + 1 < settings.successes:
        return replace(state, successes=state.successes + 1)
    return _FRESH


def tick(state: BreakerState, now: float, settings: BreakerSettings) -> BreakerState:
    """The state once `now` is here: an open breaker whose cooldown is over becomes half-open."""
    if state.phase is BreakerPhase.OPEN and now >= until(state, settings):
        return replace(state, phase=BreakerPhase.HALF_OPEN, successes=0)
    return state


def reopened(state: BreakerState, now: float, error: str) -> BreakerState:
    """The state after a self test that failed while it was open: another whole cooldown."""
    return replace(state, phase=BreakerPhase.OPEN, opened_at=now, successes=0, last_error=error)


def until(state: BreakerState, settings: BreakerSettings) -> float:
    """Clock time at which an open breaker's cooldown is over."""
    return (state.opened_at or 0.0) + settings.cooldown_s


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Health:
    """What selection may know of past failures: breaker states by name, and quarantined kernels.

    `version` grows with every change that dispatch must hear of. `fingerprint` is equal whenever the same names
    are blocked, so choices made before a short outage are valid again after it.
    """

    kernels: Mapping[str, BreakerState] = field(default_factory=_empty)
    backends: Mapping[str, BreakerState] = field(default_factory=_empty)
    quarantined: Mapping[str, str] = field(default_factory=_empty)
    settings: BreakerSettings = field(default_factory=BreakerSettings)
    version: int = 0
    fingerprint: str = ""

    def state(self, kernel_id: str) -> BreakerState:
        """The kernel's own breaker; a fresh one if nothing happened yet."""
        return self.kernels.get(kernel_id, _FRESH)

    def blocks(self, kernel_id: str, backend: str | None = None) -> bool:
        """Whether the kernel, its backend or a quarantine forbids a call. The backend is the id's first word."""
        return self.blocked_by(kernel_id, backend) is not None

    def blocked_by(self, kernel_id: str, backend: str | None = None) -> Reason | None:
        if kernel_id in self.quarantined:
            return reason(ReasonCode.QUARANTINED, self.quarantined[kernel_id])
        name = backend if backend is not None else kernel_id.partition(".")[0]
        for state, detail in ((self.kernels.get(kernel_id), ""), (self.backends.get(name), f"backend {name}")):
            if state is not None and state.blocks:
                return reason(ReasonCode.CIRCUIT_OPEN, state.last_error, self.settings.cooldown_s, detail=detail)
        return None

    def watches(self, kernel_id: str, backend: str | None = None) -> bool:
        """Whether dispatch should report a success of this kernel (false for the healthy, so they pay nothing)."""
        name = backend if backend is not None else kernel_id.partition(".")[0]
        return self.kernels.get(kernel_id, _FRESH).watched or self.backends.get(name, _FRESH).watched

    def status(self, kernel_id: str, backend: str | None = None) -> HealthStatus:
        """The worse of the kernel's and its backend's status; a quarantined kernel is unhealthy."""
        if self.blocks(kernel_id, backend):
            return HealthStatus.UNHEALTHY
        return HealthStatus.DEGRADED if self.watches(kernel_id, backend) else HealthStatus.HEALTHY


_log = logging.getLogger("layerzero.health")

LAST_RESORT = "reference"
"""The backend everything falls back on: its own breaker never opens because of its kernels."""

_OPEN, _HALF_OPEN = BreakerPhase.OPEN, BreakerPhase.HALF_OPEN

Listener = Callable[[Health], None]


class HealthRegistry:
    """Thread-safe breakers of all kernels and backends. Names without a past cost no memory."""

    def __init__(self, settings: BreakerSettings | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings or BreakerSettings()
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, dict[str, BreakerState]] = {"kernel": {}, "backend": {}}
        self._owners: dict[str, str] = {}
        self._quarantined: dict[str, str] = {}
        self._version = 0
        self._snapshot: Health | None = None
        self._listeners: list[Listener] = []

    def kernel_failed(
        self, kernel_id: str, error: BaseException | str = "", backend: str | None = None
    ) -> BreakerState:
        """Count a failed call of the kernel; returns its new state. Its backend may open with it."""
        after = self._step("kernel", kernel_id, lambda s, now, cfg: on_failure(s, now, cfg, _text(error)))
        if after.blocks:
            self._backend_of(kernel_id, backend, _text(error))
        return after

    def _backend_of(self, kernel_id: str, backend: str | None, error: str) -> None:
        """A kernel is open: so is its backend, when it was half-open or enough of its kernels are set aside."""
        name = kernel_id.partition(".")[0] if backend is None else backend
        if name == LAST_RESORT or not self._settings.enabled:
            return
        with self._lock:
            self._owners[kernel_id] = name
            ill = [
                other
                for other, state in self._states["kernel"].items()
                if state.phase is not BreakerPhase.CLOSED and self._owners.get(other) == name
            ]
            now, before = self._clock(), self._states["backend"].get(name, _FRESH)
            many = before.phase is BreakerPhase.CLOSED and len(ill) >= self._settings.backend_kernels
            if not many and before.phase is not _HALF_OPEN:
                return
            why = f"{len(ill)} of its kernels are set aside, the last: {error}"
            self._states["backend"][name] = reopened(before, now, why)
            health = self._changed()
        _log.error("backend %s is set aside: %s", name, why)
        self._tell(health)

    def kernel_succeeded(self, kernel_id: str) -> BreakerState:
        """Count a good call of the kernel. Free of locks while the kernel has no past."""
        return self._step("kernel", kernel_id, on_success)

    def backend_failed(self, backend: str, error: BaseException | str = "") -> BreakerState:
        """Count a failure of a whole backend (import, self test): when open, all its kernels are blocked."""
        return self._step("backend", backend, lambda s, now, cfg: on_failure(s, now, cfg, _text(error)))

    def backend_succeeded(self, backend: str) -> BreakerState:
        return self._step("backend", backend, on_success)

    def due(self) -> tuple[tuple[str, str], ...]:
        """("kernel" or "backend", name) of every breaker whose cooldown is over and that is open still."""
        now = self._clock()
        with self._lock:
            return tuple(
                (kind, name)
                for kind, states in self._states.items()
                for name, state in states.items()
                if state.phase is _OPEN and now >= until(state, self._settings)
            )

    def rest(self, kind: str, name: str, error: str) -> None:
        """A self test failed: the breaker stays open for another cooldown."""
        with self._lock:
            before = self._states[kind].get(name)
            if before is not None and before.phase is _OPEN:
                self._states[kind][name] = reopened(before, self._clock(), error)
                self._snapshot = None

    def tick(self, only: Collection[tuple[str, str]] | None = None) -> bool:
        """Move every breaker whose cooldown is over (or `only` these of them) to half-open; True if any did."""
        now = self._clock()
        with self._lock:
            changed = False
            for kind, states in self._states.items():
                for name, state in states.items():
                    if only is not None and (kind, name) not in only:
                        continue
                    after = tick(state, now, self._settings)
                    changed |= after is not state
                    states[name] = after
            health = self._changed() if changed else None
        self._tell(health)
        return changed

    def next_deadline(self) -> float | None:
        """Clock time at which `tick` next has something to do (never in the past), or None."""
        with self._lock:
            waits = [until(s, self._settings) for states in self._states.values() for s in states.values() if s.blocks]
        return max(self._clock(), min(waits)) if waits else None

    def configure(self, settings: BreakerSettings) -> None:
        """Use other settings from now on; open breakers follow the new cooldown at the next tick."""
        with self._lock:
            self._settings = settings
            health = self._changed()
        self._tell(health)

    def set_quarantined(self, kernels: Mapping[str, str]) -> None:
        """Replace the quarantined kernels (id → why); they are blocked whatever their breaker says."""
        with self._lock:
            if self._quarantined == dict(kernels):
                return
            self._quarantined = dict(kernels)
            health = self._changed()
        self._tell(health)

    def reset(self, name: str | None = None) -> None:
        """Forget the failures of one kernel or backend, or of all. Quarantine stays."""
        with self._lock:
            for states in self._states.values():
                if name is None:
                    states.clear()
                else:
                    states.pop(name, None)
            health = self._changed()
        self._tell(health)

    def snapshot(self) -> Health:
        with self._lock:
            return self._health()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with a snapshot after each visible change; returns the way to stop it.

        Listeners run in the thread that caused the change, outside the lock. Two may run at once: keep the
        snapshot with the higher `version`. One that raises is logged and costs nobody else anything.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def reinit_after_fork(self) -> None:
        """Replace the lock in a forked child, where its owner may not exist any more."""
        self._lock = threading.Lock()

    def _step(
        self, kind: str, name: str, move: Callable[[BreakerState, float, BreakerSettings], BreakerState]
    ) -> BreakerState:
        states = self._states[kind]
        if move is on_success and name not in states:
            return _FRESH
        with self._lock:
            before = states.get(name, _FRESH)
            after = move(before, self._clock(), self._settings)
            if after == _FRESH:
                states.pop(name, None)
            else:
                states[name] = after
            self._snapshot = None
            visible = (before.phase, before.watched) != (after.phase, after.watched)
            health = self._changed() if visible else None
        self._tell(health)
        return after

    def _changed(self) -> Health:
        self._version += 1
        self._snapshot = None
        return self._health()

    def _health(self) -> Health:
        if self._snapshot is None:
            kernels, backends = dict(self._states["kernel"]), dict(self._states["backend"])
            self._snapshot = Health(
                MappingProxyType(kernels), MappingProxyType(backends), MappingProxyType(dict(self._quarantined)),
                self._settings, self._version, _fingerprint(kernels, backends, self._quarantined),
            )  # fmt: skip
        return self._snapshot

    def _tell(self, health: Health | None) -> None:
        if health is None:
            return
        for listener in tuple(self._listeners):
            try:
                listener(health)
            except Exception:
                _log.exception("a health listener raised")


def _text(error: BaseException | str) -> str:
    return error if isinstance(error, str) else f"{type(error).__name__}: {error}"


def _fingerprint(*named: Mapping[str, BreakerState | str]) -> str:
    """Hash of the blocked names only: counters and error texts do not change a choice."""
    blocked = ["\x1f".join(sorted(n for n, s in part.items() if isinstance(s, str) or s.blocks)) for part in named]
    return hashlib.sha256("\x1e".join(blocked).encode()).hexdigest()[:16]
