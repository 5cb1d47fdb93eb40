"""Hooks of the Triton backend."""

from __future__ import annotations

import sys
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
    registrar.backend(CAPABILITIES)
    custom = sys.modules.get("layerzero_triton.custom")  # a program that never imported it has registered nothing
    for kernel in custom.registered() if custom is not None else ():
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
