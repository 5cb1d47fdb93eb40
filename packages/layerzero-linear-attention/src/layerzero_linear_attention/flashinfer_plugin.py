"""Hooks of the backend that calls FlashInfer, and building what it compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    CompileOrder,
    DeviceSpec,
    NeedsDevice,
    Reason,
    Registrar,
    dist_version,
    hookimpl,
    needs_sm,
    reason,
    vendor_status,
)

LAYERZERO_API = ">=2,<3"
CAPABILITIES = Path(__file__).with_name("flashinfer.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Vendor, its compiler, device."""
    return vendor_status(CAPABILITIES, device, needs_sm(80), compiler)


def compiler(device: DeviceSpec) -> Iterator[Reason]:
    """Without its compiled package FlashInfer builds each kernel at first use, by nvcc and ninja."""
    if device.device_type != "cuda" or dist_version("flashinfer-jit-cache") is not None:
        return
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = os.pathsep.join((os.environ.get("PATH", ""), str(Path(toolkit, "bin"))))
    missing = [tool for tool in ("nvcc", "ninja") if shutil.which(tool, path=path) is None]
    if missing:
        yield reason("JIT_TOOLCHAIN_MISSING", " and ".join(missing))


def compile_order(order: CompileOrder) -> tuple[str, ...]:
    """Build the module of one call for a device that is not here; its library."""
    found = order.device.sm_version
    if found is None:
        raise NeedsDevice(f"FlashInfer builds nothing for {order.device.name or order.device.device_type}")
    # FlashInfer reads both when it is imported: what to build for, and how many compilers run beside requests
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{found // 10}.{found % 10}{'a' if found >= 90 else ''}")
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 1) // 2)))
    import torch
    from flashinfer.jit import gdn, mamba

    if order.function.endswith(":gated_delta_rule"):
        spec = gdn.gen_gdn_prefill_sm90_module()
    else:
        make = mamba.gen_selective_state_update_sm90_module if found >= 90 else mamba.gen_selective_state_update_module
        x, B, wide = order.args[0], order.args[3], torch.float32
        spec = make(wide, x.dtype, wide, wide, torch.int32, None, x.shape[3], B.shape[3], 1)
    if not spec.is_compiled:
        spec.build(verbose=False)
    return (str(spec.get_library_path()),)
