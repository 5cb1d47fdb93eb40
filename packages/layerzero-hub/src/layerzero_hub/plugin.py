"""Hooks of the Kernel Hub backend."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor; nothing is fetched and no kernel is trusted here."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """The library `kernels`; the hub itself is not asked."""
    return vendor_status(CAPABILITIES, device)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Nothing can be shown to be right before there is a kernel."""
    return HealthReport(backend, False, "no kernels to test yet")
