"""Plugin of the built-in backend `inductor`: kernels that torch's own compiler makes for this machine."""

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
    """The compiler ships with torch; what is asked is whether it finds a C++ compiler."""
    from layerzero.backends.inductor.toolchain import needs_compiler

    return vendor_status(CAPABILITIES, device, needs_compiler)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test of the programs as they are written; compiling them takes too long for a self test."""
    from layerzero.backends.inductor.health import self_test

    return self_test()
