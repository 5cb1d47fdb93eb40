"""Hooks of the backend that calls fla-core."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    Context,
    DeviceSpec,
    Reason,
    Registrar,
    dist_version,
    hookimpl,
    needs_sm,
    reason,
    vendor_status,
)
from layerzero.plugin.versions import contains

LAYERZERO_API = ">=2,<3"
CAPABILITIES = Path(__file__).with_name("fla.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Vendor and device."""
    return vendor_status(CAPABILITIES, device, needs_sm(80))


def hopper_backward(context: Context) -> list[Reason]:
    """Their backward of the gated delta rule raises on Hopper under a Triton that compiles it wrongly, unless tilelang
    is there to compute it."""
    found = dist_version("triton") or ""
    wrong = context.needs_grad and context.device.sm_version == 90 and contains(">=3.4,<3.7.1", found)
    return [reason("BACKWARD_UNSUPPORTED", f"triton {found}")] if wrong and dist_version("tilelang") is None else []
