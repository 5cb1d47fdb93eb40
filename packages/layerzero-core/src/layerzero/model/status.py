"""What a backend says about itself: is it usable here, and does it compute right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerzero.reasons import Reason

__all__ = ["BackendStatus", "HealthReport"]


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Answer of `layerzero_capabilities`: vendor version, usable kernels, and otherwise reason and fix."""

    backend: str
    available: bool
    version: str | None = None
    kernels: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {
            "backend": self.backend,
            "available": self.available,
            "version": self.version,
            "kernels": list(self.kernels),
            "reasons": [item.to_json() for item in self.reasons],
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Answer of `layerzero_health`: did the known-answer test pass, and with what error."""

    backend: str
    ok: bool
    detail: str = ""
    max_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        return {"backend": self.backend, "ok": self.ok, "detail": self.detail, "max_error": self.max_error}
