"""Compiling Triton kernels for a device that is not here: nothing is launched, nothing allocated. Imports Triton.

A backend whose kernels are Triton's names "layerzero.plugin.triton_compiler:compile_order" as their `compiler`.

The adapter runs on meta tensors as it would on real ones. Triton asks its driver for the target and compiles what the
launch would have needed, through its own code, so that the keys of its cache are those of the process that will load
it; where that process would launch, the launch is left out. What Triton would have gcc build at the first launch on an
NVIDIA device, its driver's helpers and the launcher of each signature, is built here too, and not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import build, driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from layerzero.model.artifact import CompileOrder, NeedsDevice
from layerzero.model.device import DeviceSpec

_log = logging.getLogger("layerzero.jit")


def compile_order(order: CompileOrder) -> tuple[str, ...]:
    """Compile what the launches of one call need; the shared libraries among it. Raises NeedsDevice for kernels that
    Triton autotunes."""
    with _absent(order.device) as kernels:
        order.run()
    return _launchers(kernels) if order.device.gfx is None else ()


def target_of(device: DeviceSpec) -> GPUTarget:
    """What Triton calls this device."""
    if device.gfx is not None:
        return GPUTarget("hip", device.gfx, 64 if device.gfx.startswith("gfx9") else 32)
    if device.sm_version is None:
        raise NeedsDevice(f"Triton has no target for {device.name or device.device_type}")
    return GPUTarget("cuda", device.sm_version, 32)


class _NotLoaded:
    """An extension that was built and not loaded: it needs the CUDA driver."""

    def __getattr__(self, name: str) -> None:
        return None


def _launchers(kernels: list[Any]) -> tuple[str, ...]:
    """Build what launching these kernels takes beside them, where Triton will look for it; the paths."""
    paths: list[str] = []

    def found(name: str, path: str) -> _NotLoaded:
        paths.append(path)
        return _NotLoaded()

    kept = build._load_module_from_path
    build._load_module_from_path = found
    try:
        nvidia: Any = importlib.import_module("triton.backends.nvidia.driver")
        nvidia.CudaUtils()
        for kernel in kernels:
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
    except Exception as error:  # the process that serves builds it then, as Triton does by itself
        _log.info("the launcher is left to the first launch, %s: %s", type(error).__name__, error)
    finally:
        build._load_module_from_path = kept
    return tuple(dict.fromkeys(paths))


@contextlib.contextmanager
def _absent(device: DeviceSpec) -> Iterator[list[Any]]:
    """Inside the block Triton compiles for this device and launches nothing; the kernels that would be launched.

    Afterwards its driver has no device.
    """
    kept, tuned = JITFunction.run, Autotuner.run
    kernels: list[Any] = []

    @functools.wraps(kept)
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **words: Any) -> Any:
        kernels.append(kept(self, *args, grid=grid, warmup=True, **words))
        return kernels[-1]

    @functools.wraps(tuned)
    def refuse(self: Any, *args: Any, **words: Any) -> Any:
        if len(self.configs) > 1:
            raise NeedsDevice(f"{self.base_fn.__name__} is autotuned over {len(self.configs)} configurations")
        return tuned(self, *args, **words)

    target = target_of(device)
    without_device: Any = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("meta"),
    )
    driver.set_active(without_device)
    JITFunction.run, Autotuner.run = compile_only, refuse
    try:
        yield kernels
    finally:
        JITFunction.run, Autotuner.run = kept, tuned
