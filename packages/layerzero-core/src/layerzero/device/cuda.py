"""NVIDIA and AMD GPUs, both of which torch calls "cuda". Every function takes torch as an argument."""

from __future__ import annotations

import re
import sys
from typing import Any

from layerzero.device.memory import text_of
from layerzero.device.spec import (
    CUDA_MAX_GRID,
    CUDA_MAX_THREADS_PER_BLOCK,
    DEFAULT_GENERATIONS,
    DeviceSpec,
    GenerationMap,
    InstructionFamily,
    Platform,
)

_KERNEL_DRIVER = "/sys/module/nvidia/version"
_PROC_DRIVER = "/proc/driver/nvidia/version"
_AMD_DRIVER = "/sys/module/amdgpu/version"

# gfx name → (has MFMA, has bf16 matrix math, torch computes in fp8 there). Prefixes, the longest first.
_GFX = (
    ("gfx950", True, True, True),
    ("gfx940", True, True, True),
    ("gfx941", True, True, True),
    ("gfx942", True, True, True),
    ("gfx90a", True, True, False),
    ("gfx908", True, True, False),
    ("gfx12", False, True, True),
    ("gfx11", False, True, False),
)


def gpu_spec(torch: Any, index: int, *, generations: GenerationMap = DEFAULT_GENERATIONS) -> DeviceSpec:
    """Describe one GPU from `torch.cuda.get_device_properties`: an AMD one where torch was built for ROCm.

    That has no SM version; routing reads `gfx` and the MFMA family.
    """
    found = torch.cuda.get_device_properties(index)
    given: dict[str, Any] = {
        "name": str(found.name),
        "index": index,
        "memory_bytes": int(found.total_memory),
        "torch_version": str(torch.__version__),
        "max_threads_per_block": int(getattr(found, "max_threads_per_block", CUDA_MAX_THREADS_PER_BLOCK)),
        "multiprocessors": int(found.multi_processor_count),
    }
    rocm = getattr(torch.version, "hip", None)
    if rocm:
        gfx = re.match(r"gfx[0-9a-f]+", str(getattr(found, "gcnArchName", "")))
        given |= {"rocm_version": str(rocm), "driver_version": _first_line(_AMD_DRIVER)}
        return amd_spec(gfx[0] if gfx else None, **given)
    given |= {"cuda_version": torch.version.cuda, "driver_version": driver_version(torch)}
    return DeviceSpec.for_sm(found.major * 10 + found.minor, generations=generations, **given)


def amd_spec(gfx: str | None, **given: Any) -> DeviceSpec:
    """An AMD GPU with what follows from its gfx name; `given` sets any other field."""
    unknown = (False, False, False)
    mfma, bf16, fp8 = next((row[1:] for row in _GFX if gfx and gfx.startswith(row[0])), unknown)
    families = frozenset({InstructionFamily.MFMA}) if mfma else frozenset()
    return DeviceSpec(
        Platform.ROCM, "cuda", vendor="amd", gfx=gfx, instruction_families=families,
        supports_bf16=bf16, supports_fp16=True, supports_fp8=fp8, max_grid=CUDA_MAX_GRID, **given,
    )  # fmt: skip


def driver_version(torch: Any) -> str | None:
    """The NVIDIA driver's version, "580.65.06"; else the newest CUDA it supports as torch knows it, "cuda 13.0".

    The kernel module is asked before NVML: it answers alike in every process, and signatures depend on it.
    """
    return _from_module() or _from_nvml() or _from_torch(torch)


def _from_module() -> str | None:
    found = _first_line(_KERNEL_DRIVER)
    if found is None:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _first_line(_PROC_DRIVER) or "")
        found = match[1] if match else None
    return found


def _from_nvml() -> str | None:
    # Only a binding that the process has loaded already: a probe must not import vendor libraries.
    nvml = sys.modules.get("pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            found = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except Exception:  # NVMLError has no stable home to import it from; without NVML the other sources speak
        return None
    return found.decode() if isinstance(found, bytes) else str(found)


def _from_torch(torch: Any) -> str | None:
    try:
        number = int(torch._C._cuda_getDriverVersion())
    except Exception:  # no driver behind this torch, or one that does not tell
        return None
    return f"cuda {number // 1000}.{number % 1000 // 10}" if number else None


def _first_line(path: str) -> str | None:
    return text_of(path).partition("\n")[0].strip() or None
