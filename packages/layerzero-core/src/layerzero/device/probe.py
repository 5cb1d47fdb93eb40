"""Which device is this? One `DeviceSpec` per device of the process, made once.

`probe_device` is what `DeviceSpec.detect` calls. torch is an argument everywhere, so that CUDA, ROCm, XPU, HPU and MPS
can be described by stand-ins; without one, the real torch is imported when first asked.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerzero.device.cpu import cpu_spec
from layerzero.device.cuda import gpu_spec
from layerzero.device.signature import backend_versions
from layerzero.device.spec import DEFAULT_GENERATIONS, DeviceSpec, GenerationMap, Platform
from layerzero.errors import InvalidInputError

if TYPE_CHECKING:
    import torch as torch_module

_ORDER = ("cuda", "hpu", "xpu", "mps")  # the accelerator that is taken when none is named
_PLATFORMS = {"mps": Platform.MPS, "xpu": Platform.XPU, "hpu": Platform.HPU, "meta": Platform.META}
_VENDORS = {"mps": "apple", "xpu": "intel", "hpu": "habana"}
_NAME = re.compile(r"^([a-z_][a-z0-9_]*)(?::(\d+))?$")

_cache: dict[tuple[str, int], DeviceSpec] = {}


def probe_device(
    device: torch_module.device | str | int | None = None,
    *,
    torch: Any = None,
    generations: GenerationMap = DEFAULT_GENERATIONS,
) -> DeviceSpec:
    """Describe a device: a torch device, "cuda:1", an index, or None for the first accelerator, else the CPU.

    The result for the real torch and the default generations is kept in this process.
    Raises InvalidInputError (DEVICE_NOT_PRESENT) for a device that is not here.
    """
    kept = torch is None and generations is DEFAULT_GENERATIONS
    if kept and device is not None and not isinstance(device, (str, int)):
        # A tensor's device, asked for at every selection: no need to ask the driver again.
        found = _cache.get((device.type, 0 if device.type == "cpu" else device.index))
        if found is not None:
            return found
    torch = importlib.import_module("torch") if torch is None else torch
    kind, index = _resolve(device, torch)
    if kept and (kind, index) in _cache:
        return _cache[kind, index]
    spec = replace(_describe(torch, kind, index, generations), backend_versions=backend_versions())
    return _cache.setdefault((kind, index), spec) if kept else spec


def probe_devices(*, torch: Any = None) -> tuple[DeviceSpec, ...]:
    """Every device here: the accelerators in order, then the CPU."""
    module = importlib.import_module("torch") if torch is None else torch
    found = [f"{kind}:{index}" for kind in _ORDER for index in range(_count(module, kind))]
    return tuple(probe_device(name, torch=torch) for name in [*found, "cpu"])


def _resolve(device: Any, torch: Any) -> tuple[str, int]:
    if device is None:
        kind = next((kind for kind in _ORDER if _count(torch, kind)), "cpu")
        return kind, _current(torch, kind)
    index: int | None
    if isinstance(device, int) and not isinstance(device, bool):
        kind, index = next((kind for kind in _ORDER if _count(torch, kind)), "cuda"), device
    elif hasattr(device, "type") and hasattr(device, "index"):
        kind, index = str(device.type), device.index
    else:
        match = _NAME.match(str(device).lower())
        if match is None:
            raise InvalidInputError(code="VALUE_INVALID", value=repr(device), limit="a device such as 'cuda:0'")
        kind, index = match[1], None if match[2] is None else int(match[2])
    if index is None:
        index = _current(torch, kind)
    if kind in ("cpu", "meta"):
        return kind, 0
    if not 0 <= index < _count(torch, kind):
        here = [f"{word}:{number}" for word in _ORDER for number in range(_count(torch, word))] + ["cpu"]
        raise InvalidInputError(code="DEVICE_NOT_PRESENT", value=f"{kind}:{index}", limit=here)
    return kind, index


def _count(torch: Any, kind: str) -> int:
    """How many devices of a kind are usable; a broken driver counts as none."""
    try:
        module = getattr(torch, kind)
        if kind == "mps":
            return 1 if torch.backends.mps.is_available() else 0
        return int(module.device_count()) if module.is_available() else 0
    except Exception:  # no such module, or whatever a vendor's driver raises: the CPU is still there
        return 0


def _current(torch: Any, kind: str) -> int:
    try:
        return 0 if kind in ("cpu", "meta") else int(getattr(torch, kind).current_device())
    except Exception:  # no driver: `_resolve` says that the device is not here
        return 0


def _describe(torch: Any, kind: str, index: int, generations: GenerationMap) -> DeviceSpec:
    if kind == "cpu":
        return cpu_spec(torch)
    if kind == "cuda":
        return gpu_spec(torch, index, generations=generations)
    real = kind != "meta"  # meta tensors hold nothing, so every dtype works and no kernel runs
    try:
        properties = getattr(torch, kind).get_device_properties(index)
    except Exception:  # a name is worth having, but not worth failing for
        properties = None
    return DeviceSpec(
        platform=_PLATFORMS.get(kind, Platform.OTHER),
        device_type=kind,
        name=str(getattr(properties, "name", "") or kind),
        vendor=_VENDORS.get(kind, ""),
        index=index,
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        driver_version=str(properties.driver_version) if hasattr(properties, "driver_version") else None,
        torch_version=str(torch.__version__),
        supports_bf16=True,
        supports_fp16=True,
        supports_fp8=kind == "hpu" or not real,
        multiprocessors=int(getattr(properties, "gpu_subslice_count", 0)),
    )
