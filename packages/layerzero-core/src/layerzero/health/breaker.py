"""Circuit breakers: closed → open after N failures → half-open after a cooldown → closed, or open again.

The state machine is a handful of pure functions over a frozen `BreakerState`; time comes in as an argument.
`Health` is what selection reads of them; `layerzero.health.registry` holds the states and hands out such snapshots.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

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
        """A JSON-compatible dict, without clock values, which mean nothing outside the process."""
        found = Plain.to_json(self) | {"status": self.status.value}
        del found["opened_at"]
        return found


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
