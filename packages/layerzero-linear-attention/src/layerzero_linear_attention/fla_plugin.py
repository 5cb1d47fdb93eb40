"""Hooks of the backend that calls fla-core."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import BackendStatus, DeviceSpec, Registrar, hookimpl, needs_sm, vendor_status

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
