"""Hooks of the Triton backend."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    Registrar,
    hookimpl,
    needs_sm,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register our kernels, and those the program has registered itself so far."""
    from layerzero_triton.custom import registered

    registrar.backend(CAPABILITIES)
    for kernel in registered():
        registrar.kernel(kernel.spec)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Triton, and a device it compiles for."""
    return vendor_status(CAPABILITIES, device, needs_sm(80))


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero_triton.health import self_test

    return self_test()
