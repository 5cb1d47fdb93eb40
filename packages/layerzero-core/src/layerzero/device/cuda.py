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


def is_rocm(torch: Any) -> bool:
    """Whether this torch was built for ROCm."""
    return bool(getattr(torch.version, "hip", None))


def cuda_spec(torch: Any, index: int, *, generations: GenerationMap = DEFAULT_GENERATIONS) -> DeviceSpec:
    """Describe one NVIDIA GPU from `torch.cuda.get_device_properties`."""
    found = torch.cuda.get_device_properties(index)
    return DeviceSpec.for_sm(
        found.major * 10 + found.minor,
        generations=generations,
        name=str(found.name),
        index=index,
        memory_bytes=int(found.total_memory),
        cuda_version=torch.version.cuda,
        driver_version=driver_version(torch),
        torch_version=str(torch.__version__),
        max_threads_per_block=int(getattr(found, "max_threads_per_block", CUDA_MAX_THREADS_PER_BLOCK)),
        multiprocessors=int(found.multi_processor_count),
    )


def rocm_spec(torch: Any, index: int) -> DeviceSpec:
    """Describe one AMD GPU. There is no SM version; routing reads `gfx` and the MFMA family."""
    found = torch.cuda.get_device_properties(index)
    gfx = re.match(r"gfx[0-9a-f]+", str(getattr(found, "gcnArchName", "")))
    return amd_spec(
        gfx[0] if gfx else None,
        name=str(found.name),
        index=index,
        memory_bytes=int(found.total_memory),
        rocm_version=str(torch.version.hip),
        driver_version=_first_line(_AMD_DRIVER),
        torch_version=str(torch.__version__),
        max_threads_per_block=int(getattr(found, "max_threads_per_block", CUDA_MAX_THREADS_PER_BLOCK)),
        multiprocessors=int(found.multi_processor_count),
    )


def amd_spec(gfx: str | None, **given: Any) -> DeviceSpec:
    """An AMD GPU with what follows from its gfx name; `given` sets any other field."""
    mfma, bf16, fp8 = gfx_features(gfx)
    families = frozenset({InstructionFamily.MFMA}) if mfma else frozenset()
    return DeviceSpec(
        Platform.ROCM, "cuda", vendor="amd", gfx=gfx, instruction_families=families,
        supports_bf16=bf16, supports_fp16=True, supports_fp8=fp8, max_grid=CUDA_MAX_GRID, **given,
    )  # fmt: skip


def gfx_features(gfx: str | None) -> tuple[bool, bool, bool]:
    """(MFMA, bf16, fp8) of a gfx name; all False for one that is not known, never an exception."""
    for prefix, mfma, bf16, fp8 in _GFX:
        if gfx and gfx.startswith(prefix):
            return mfma, bf16, fp8
    return False, False, False


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
    get = getattr(getattr(torch, "_C", None), "_cuda_getDriverVersion", None)
    if get is None:
        return None
    try:
        number = int(get())
    except Exception:  # no driver behind this torch
        return None
    return f"cuda {number // 1000}.{number % 1000 // 10}" if number else None


def _first_line(path: str) -> str | None:
    return text_of(path).partition("\n")[0].strip() or None
