"""Hooks of the xFormers backend."""

from __future__ import annotations

import ctypes
import importlib.util
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
_RUNTIME = "libcudart.so.12"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the kernels of the descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Vendor, its neighbours, this device; XFORMERS_MORE_DETAILS=1 makes the vendor itself say more."""
    return vendor_status(CAPABILITIES, device, needs_sm(75), flash_attention_2, cuda_runtime)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test of every kernel."""
    from layerzero_xformers.health import self_test

    return self_test()


def flash_attention_2(device: DeviceSpec) -> Iterable[Reason]:
    """A FlashAttention 2 that xFormers can see has to be one it takes; FlashAttention 4 is a declared conflict."""
    if dist_version("flash-attn") is None or importlib.util.find_spec("flash_attn") is None:
        return ()
    return needs_dist("flash-attn", ">=2.7.1,<=2.8.4")(device)


def cuda_runtime(device: DeviceSpec) -> Iterable[Reason]:
    """The published wheels want the CUDA 12 runtime; beside a torch for another CUDA it has to be on the path."""
    version = device.cuda_version
    if version is None or version.partition(".")[0] == "12":
        return ()
    try:
        ctypes.CDLL(_RUNTIME)
    except OSError:
        why = reason("CUDA_VERSION_MISMATCH", version, "12", detail=f"{_RUNTIME} cannot be loaded")
        fix = (
            "pip install --target FOLDER nvidia-cuda-runtime-cu12, then isolation: {xformers: {mode: subprocess, "
            "env: {LD_LIBRARY_PATH: FOLDER/nvidia/cuda_runtime/lib}}} in the policy"
        )
        return (replace(why, hint=fix),)
    return ()
