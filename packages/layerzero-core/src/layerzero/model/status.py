"""What a backend says about itself: is it usable here, and does it compute right."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.json_form import Plain
from layerzero.reasons import Reason


@dataclass(frozen=True, slots=True)
class BackendStatus(Plain):
    """Answer of `layerzero_capabilities`: vendor version, usable kernels, and otherwise reason and fix."""

    backend: str
    available: bool
    version: str | None = None
    kernels: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class HealthReport(Plain):
    """Answer of `layerzero_health`: did the known-answer test pass, and with what error."""

    backend: str
    ok: bool
    detail: str = ""
    max_error: float | None = None
