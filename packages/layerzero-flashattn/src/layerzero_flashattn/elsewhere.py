"""Compiling FlashAttention 4 and QuACK for a device that is not here: nothing is launched, nothing allocated.

Both select kernels and compile them for a device named by variables, and keep what they compiled as object files. The
adapter runs on torch's fake CUDA tensors as it would on real ones, so that the keys of the object files are those of
the process that will load them. What the CuTe compiler gives, and what would be loaded from an earlier compilation, is
replaced by something that can be exported and does nothing when it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from layerzero.plugin import CompileOrder, DeviceSpec, NeedsDevice

_begun: tuple[int, int | None] | None = None  # the SM and the multiprocessors this process compiles for
_failed: list[BaseException] = []  # exports that failed: both libraries go on without a word


def compile_order(order: CompileOrder) -> None:
    """Compile what the launches of one call need, and leave it where the libraries keep such."""
    if order.needs_grad:  # autograd keeps a thread for each device, and there is none
        raise NeedsDevice("its backward pass is compiled by running it", in_thread=True)
    _stand_for(order.device)
    _failed.clear()
    with FakeTensorMode():
        args = tuple(_fake(item) for item in order.args)
        kwargs = {name: _fake(item) for name, item in order.kwargs.items()}
        try:
            dataclasses.replace(order, args=args, kwargs=kwargs).run()
        except DataDependentOutputException as error:
            raise NeedsDevice(f"{order.function} reads what its tensors hold") from error
    if _failed:
        raise RuntimeError(f"what was compiled cannot be kept: {_failed[0]}") from _failed[0]


def _fake(value: Any) -> Any:
    """A tensor without memory, as if on a CUDA device; batches with such tensors in them."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: _fake(item) for k, item in parts.items() if isinstance(item, Tensor)})
    return value


def _stand_for(device: DeviceSpec) -> None:
    """Name the device to both libraries before they are imported, which remember it: one device for each process."""
    global _begun
    if device.sm_version is None:
        raise NeedsDevice(f"CuTe has no target for {device.name or device.device_type}")
    wanted = (device.sm_version, device.multiprocessors)
    if _begun == wanted:
        return
    if _begun is not None:
        raise NeedsDevice(f"this compiler has begun with SM {_begun[0]} and cannot compile for SM {wanted[0]}")
    _begun = wanted
    number, count = wanted
    target = f"sm_{number}a" if number >= 90 else f"sm_{number}"
    os.environ.update(CUTE_DSL_ARCH=target, FLASH_ATTENTION_ARCH=f"sm_{number}", QUACK_ARCH=str(number))
    if count is not None:
        os.environ["FLASH_ATTENTION_NUM_SMS"] = str(count)
    _answer(SimpleNamespace(major=number // 10, minor=number % 10, multi_processor_count=count, name=target))
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    kind: Any = type(importlib.import_module("cutlass.cute").compile)
    kind.__call__ = _not_launched(kind.__call__)
    runtime.load_module = lambda path, **options: _NotLoaded()


def _answer(properties: Any) -> None:
    """Answer what torch would ask the driver. For good: this process has no device."""
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = lambda device: contextlib.nullcontext()
    tensor: Any = Tensor
    tensor.pin_memory = lambda self: self


class _NotLaunched:
    """A compiled kernel that can be exported."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any, **words: Any) -> None:
        return None

    def export_to_c(self, *args: Any, **words: Any) -> Any:
        """Write the object file; a failure is remembered for the answer to the order."""
        try:
            return self._compiled.export_to_c(*args, **words)
        except Exception as error:
            _failed.append(error)
            raise


class _NotLoaded:
    """An object file that lies there already: its functions do nothing here."""

    def __getitem__(self, name: str) -> Callable[..., None]:
        return lambda *args, **words: None

    __getattr__ = __getitem__


def _not_launched(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compile_only(*args: Any, **words: Any) -> _NotLaunched:
        return _NotLaunched(compile_(*args, **words))

    return compile_only
