"""Hooks of the FlashAttention backends and of QuACK. They are separate libraries, so each is a backend of its own."""

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

FA2, FA3, FA4, QUACK = (
    Path(__file__).parent / folder / "capabilities.json" for folder in ("fa2", "fa3", "fa4", "quack")
)
COMPILER = needs_dist("nvidia-cutlass-dsl", ">=4.6.2")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the four backends from their descriptors."""
    for capabilities in (FA2, FA3, FA4, QUACK):
        registrar.backend(capabilities)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> list[BackendStatus]:
    """One status for each library. Versions come from metadata: `flash_attn.cute.__version__` is not right."""
    return [
        vendor_status(FA2, device, needs_sm(80)),
        # Its C++ takes any SM from 8.0 up, also those it was not made for; so the range is kept here.
        vendor_status(FA3, device, needs_sm(90, 90)),
        vendor_status(FA4, device, needs_sm(80, 129), COMPILER),
        vendor_status(QUACK, device, needs_sm(90), COMPILER),
    ]


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero_flashattn.health import self_test

    return self_test(backend)
