"""Hooks of the FlashInfer backend."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    Reason,
    backend_hooks,
    dist_version,
    hookimpl,
    needs_sm,
    reason,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")
COMPILED = "flashinfer-jit-cache"


layerzero_register, layerzero_health = backend_hooks(__package__)[::2]  # the one between has a fix of its own below


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Vendor, its companion packages, its compiler, this device."""
    status = vendor_status(CAPABILITIES, device, needs_sm(75), companions, compiler)
    # FlashInfer imports the CuTe compiler, whose libraries are a package of their own for each CUDA version.
    for why in status.reasons:
        if why.code.value == "BACKEND_IMPORT_FAILED" and "CTK flavor" in str(why.value):
            return replace(status, fix="pip install 'nvidia-cutlass-dsl[cu13]'  # or, for CUDA 12, without [cu13]")
    return status


@hookimpl
def layerzero_warmup(shapes: list[dict[str, Any]]) -> None:
    """Compile the modules of these shapes, all at once; what is compiled already is left as it is."""
    if dist_version("flashinfer-python") is None:
        return
    from layerzero_flashinfer.modules import compile_for, shape_of

    compile_for(shape_of(shape) for shape in shapes)


def companions(device: DeviceSpec) -> Iterator[Reason]:
    """Packages of ready-made binaries need the very version of flashinfer-python; else it raises, or crashes later."""
    python = (dist_version("flashinfer-python") or "").partition("+")[0]
    for dist in ("flashinfer-cubin", COMPILED):
        version = dist_version(dist)
        if version is not None and version.partition("+")[0] != python:
            why = reason("BACKEND_VERSION_MISMATCH", f"{dist} {version}", f"=={python}")
            yield replace(why, hint=f"pip uninstall --yes {dist}")  # a matching release often does not exist


def compiler(device: DeviceSpec) -> Iterator[Reason]:
    """Without the compiled package each kernel is built at first use, by nvcc and ninja."""
    if device.device_type != "cuda" or dist_version(COMPILED) is not None:
        return
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    missing = [] if shutil.which("nvcc") or Path(toolkit, "bin", "nvcc").exists() else ["nvcc"]
    missing += [] if shutil.which("ninja") else ["ninja"]
    if missing:
        why = reason("JIT_TOOLCHAIN_MISSING", " and ".join(missing))
        yield replace(why, hint=f"install {' and '.join(missing)}, or the package {COMPILED}")
