"""Hooks of the accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    Reason,
    Registrar,
    hookimpl,
    reason,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """No vendor is needed, but a torch whose tensors can be read from C without torch's own headers."""
    return vendor_status(CAPABILITIES, device, exchange_api)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Nothing can be shown to be right before there is code to run."""
    return HealthReport(backend, False, "no code to test yet")


def exchange_api(device: DeviceSpec) -> Iterator[Reason]:
    """DLPack's exchange API came with torch 2.10."""
    import torch

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        why = reason(
            "BACKEND_VERSION_MISMATCH", f"torch {torch.__version__}", ">=2.10", detail="no DLPack exchange API"
        )
        yield replace(why, hint="pip install 'torch>=2.10'")
