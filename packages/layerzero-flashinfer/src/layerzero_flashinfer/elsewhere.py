"""Building FlashInfer's modules for a device that is not here: ninja, nvcc and the C++ compiler need none.

FlashInfer names the folder of its modules after the devices it builds for, which it reads off the devices of the
process, or off FLASHINFER_CUDA_ARCH_LIST where that is set. Here it is set, to what the process that serves would
read: the one device of the order.
"""

from __future__ import annotations

import os
from typing import Any

from layerzero.plugin import CompileOrder, DeviceSpec, NeedsDevice


def compile_order(order: CompileOrder) -> tuple[str, ...]:
    """Build the modules one kernel needs for one call, each in its own folder; their libraries."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", _arch(order.device))
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 1) // 2)))  # of nvcc, beside requests
    from layerzero_flashinfer.modules import shape_of, specs_of  # FlashInfer reads both when it is imported

    specs = specs_of(order.function, shape_of(order.context))
    if not specs:
        raise NeedsDevice(f"which modules {order.function} needs is not known")
    for spec in specs:
        if not spec.is_compiled:
            _build(spec)
    return tuple(str(spec.get_library_path()) for spec in specs)


def _build(spec: Any) -> None:
    try:
        spec.build(verbose=False)
    except RuntimeError as error:  # ninja's output: pages of command lines, and then what the compiler said
        said = [line for line in str(error).splitlines() if not line.startswith(("[", "FAILED")) and len(line) < 400]
        raise RuntimeError(f"{spec.name}: {' | '.join(said[-8:])}") from error


def _arch(device: DeviceSpec) -> str:
    if device.sm_version is None:
        raise NeedsDevice(f"FlashInfer builds nothing for {device.name or device.device_type}")
    major, minor = divmod(device.sm_version, 10)
    return f"{major}.{minor}{'a' if major >= 9 else ''}"
