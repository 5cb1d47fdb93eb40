"""Which kernels may be tried: circuit breakers in memory, quarantine on disk."""

from __future__ import annotations

from layerzero.health.breaker import (
    BreakerPhase,
    BreakerSettings,
    BreakerState,
    Health,
    HealthBook,
    HealthStatus,
    on_failure,
    on_success,
    tick,
)
from layerzero.health.quarantine import Quarantine, QuarantineEntry

__all__ = [
    "BreakerPhase",
    "BreakerSettings",
    "BreakerState",
    "Health",
    "HealthBook",
    "HealthStatus",
    "Quarantine",
    "QuarantineEntry",
    "on_failure",
    "on_success",
    "tick",
]
