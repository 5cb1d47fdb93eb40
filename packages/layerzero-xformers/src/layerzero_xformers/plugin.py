"""Hooks of the xFormers backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    Reason,
    Registrar,
    dist_version,
    hookimpl,
    needs_dist,
    needs_sm,
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
    """Vendor, its neighbours, this device; XFORMERS_MORE_DETAILS=1 makes the vendor itself say more."""
    return vendor_status(CAPABILITIES, device, needs_sm(75), flash_namespace, cuda_build)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Nothing can be shown to be right before there is a kernel."""
    return HealthReport(backend, False, "no kernels to test yet")


def flash_namespace(device: DeviceSpec) -> Iterable[Reason]:
    """xFormers takes any folder `flash_attn` for FlashAttention 2; FlashAttention 4 alone leaves one that is not."""
    if dist_version("flash-attn") is not None:
        return needs_dist("flash-attn", ">=2.7.1,<=2.8.4")(device)
    newer = dist_version("flash-attn-4")
    if newer is None:
        return ()
    why = reason("BACKEND_CONFLICT", f"flash-attn-4 {newer}", detail="flash_attn is there without FlashAttention 2")
    return (replace(why, hint="pip uninstall --yes flash-attn-4"),)


def cuda_build(device: DeviceSpec) -> Iterable[Reason]:
    """The published wheels are linked against CUDA 12."""
    version = device.cuda_version
    if version is None or version.partition(".")[0] == "12":
        return ()
    return (reason("CUDA_VERSION_MISMATCH", version, "12"),)
