"""What torch's global state says at the moment of a call: grad, autocast, capture, switches, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from layerzero.dispatch.hot import aside, before_dispatch
from layerzero.model.device import DeviceSpec


def _tf32_allowed() -> bool:
    """Whether float32 products may use TF32; torch refuses to say it the old way once a program used the new switch."""
    matmul: Any = torch.backends.cuda.matmul
    try:
        return bool(matmul.allow_tf32)
    except RuntimeError:
        return str(matmul.fp32_precision) == "tf32"


# Process-wide switches a kernel may declare as guards: word -> is it on?
SWITCHES: dict[str, Callable[[], bool]] = {
    "sdp_flash": torch._C._get_flash_sdp_enabled,
    "sdp_mem_efficient": torch._C._get_mem_efficient_sdp_enabled,
    "sdp_math": torch._C._get_math_sdp_enabled,
    "sdp_cudnn": torch._C._get_cudnn_sdp_enabled,
    "tf32": _tf32_allowed,
}

# Kinds of device whose calls are described as captured although nothing is: a capture is being rehearsed.
rehearsed: ContextVar[frozenset[str]] = ContextVar("layerzero_rehearsed", default=frozenset())

_devices: dict[torch.device, DeviceSpec] = {}
_PLAIN = (Tensor, Parameter)


def device_spec(device: torch.device) -> DeviceSpec:
    """The DeviceSpec of a torch device, detected once."""
    found = _devices.get(device)
    if found is None:
        found = _devices[device] = DeviceSpec.detect(device)
    return found


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """The tensors among canonical arguments, those inside a PagedBatch or QuantizedTensor included."""
    found: list[Tensor] = []
    for item in args:
        if isinstance(item, Tensor):
            found.append(item)
        elif hasattr(item, "tensors"):
            found.extend(item.tensors())
    return found


def as_on_device(args: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments for a kernel that believes the host: a PagedBatch with the lengths its tensors hold."""
    return tuple(item.as_on_device() if hasattr(item, "as_on_device") else item for item in args)


def plain(tensors: Iterable[Tensor]) -> bool:
    """Whether every tensor is exactly a Tensor or Parameter, and nobody follows what is done with them.

    functorch, a dispatch mode, the tracer of torch.jit.trace and forward-mode AD do: a kernel would be lost on them.
    """
    tensors = tuple(tensors)
    if functorch_active() or not all(type(tensor) in _PLAIN for tensor in tensors):
        return False
    return aside.quiet or not (followed() or carries_tangent(tensors))


def followed() -> bool:
    """Whether a dispatch mode or the tracer of torch.jit.trace looks at every op."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None or before_dispatch()


def carries_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether one of these is a dual tensor of forward-mode AD."""
    if forward_ad._current_level < 0:
        return False
    derived = (item for item in tensors if item.is_floating_point() or item.is_complex())
    return any(forward_ad.unpack_dual(item).tangent is not None for item in derived)  # type: ignore[no-untyped-call]


def functorch_active() -> bool:
    """Inside vmap, grad, jvp and the like tensors look plain but have no storage."""
    return torch._C._functorch.maybe_current_level() is not None


def autocast_dtype(device_type: str) -> str | None:
    """The autocast dtype word when autocast is on for this device type."""
    if not torch._C._is_any_autocast_enabled() or device_type not in ("cpu", "cuda", "xpu", "mps", "hpu"):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def capturing(device_type: str) -> bool:
    """Whether a CUDA graph is being captured on the current stream, or such a capture rehearsed."""
    if device_type in rehearsed.get():
        return True
    return device_type == "cuda" and torch.cuda.is_initialized() and stream_capturing()  # type: ignore[no-untyped-call]


def stream_capturing() -> bool:
    """Whether the current stream is captured. A device that is gone answers with an error; the kernel will say it."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


def switched_off() -> frozenset[str]:
    """Switches that are off right now (tf32 is off by default and counts like the others)."""
    return frozenset(name for name, on in SWITCHES.items() if not on())


def keyable_device(device: torch.device) -> bool:
    """Whether (is_cpu, index) names this device without doubt: the CPU, or the process's one accelerator."""
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type
