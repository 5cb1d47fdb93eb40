"""Hooks of the xFormers backend."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from dataclasses import replace

from layerzero.plugin import DeviceSpec, Reason, backend_hooks, dist_version, needs_dist, needs_sm, reason

_RUNTIME = "libcudart.so.12"


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


# XFORMERS_MORE_DETAILS=1 makes the vendor itself say more.
layerzero_register, layerzero_capabilities, layerzero_health = backend_hooks(
    __package__, needs_sm(75), flash_attention_2, cuda_runtime
)
