"""Plugin of the built-in backend `sdpa`; it enters by the same door as any third party's."""

from __future__ import annotations

from pathlib import Path

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the kernels of capabilities.json."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """torch is always here; which kernels fit is in the descriptor."""
    return vendor_status(CAPABILITIES, device)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero.backends.sdpa.health import self_test

    return self_test()
