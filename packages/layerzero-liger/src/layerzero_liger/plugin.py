"""Hooks of the Liger Kernel backend."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    Registrar,
    hookimpl,
    needs_dist,
    needs_sm,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Vendor, the Triton under it, this device."""
    return vendor_status(CAPABILITIES, device, needs_sm(80), needs_dist("triton", ">=3.5,<4"))


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero_liger.health import self_test

    return self_test()
