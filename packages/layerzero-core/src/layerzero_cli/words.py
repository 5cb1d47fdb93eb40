"""The words users type: dtypes, devices, shapes, names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from layerzero.model.device import DeviceSpec

_DTYPES = {
    "fp64": "float64", "f64": "float64", "double": "float64",
    "fp32": "float32", "f32": "float32", "float": "float32",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
_KNOWN = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_TORCH_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu)(:\d+)?\Z")
_SM = re.compile(r"sm_?(\d{2,3})\Z")
_MAX_DIM = 2**40


class ShapeType(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """Whole numbers separated by commas (or x): 1,32,4096,128."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in re.split(r"[,x×]", str(value).strip("[]() "))]
        if not all(re.fullmatch(r"\d{1,13}", part) and int(part) <= _MAX_DIM for part in parts):
            self.fail(f"{value!r} is not a shape; write sizes separated by commas, such as 1,32,4096,128", param, ctx)
        return tuple(int(part) for part in parts)


def dtype(word: str) -> str:
    """torch's name of a dtype; bf16, fp16, half and the like are understood."""
    from layerzero.errors import InvalidInputError, did_you_mean

    plain = word.lower().removeprefix("torch.")
    found = _DTYPES.get(plain, plain)
    if found not in _KNOWN:
        hint = did_you_mean(plain, [*_KNOWN, *_DTYPES], f"known: {', '.join(_KNOWN)}")
        raise InvalidInputError(
            f"unknown dtype {word!r}", code="DTYPE_UNSUPPORTED", value=word, limit=_KNOWN, hint=hint
        )
    return found


def device(word: str | None) -> DeviceSpec:
    """A device of this machine (cpu, cuda:1; None: the first accelerator, else the CPU), or one by name: h100, sm90."""
    from layerzero.device.catalogue import named_device
    from layerzero.device.probe import probe_device
    from layerzero.model.device import DeviceSpec

    if word is None:
        return probe_device()
    plain = word.strip().lower()
    if _TORCH_DEVICE.match(plain):
        return probe_device(plain)
    sm = _SM.match(plain)
    return DeviceSpec.for_sm(int(sm[1])) if sm else named_device(word)


def is_here(spec: DeviceSpec) -> bool:
    """Whether tensors can be made on it: calls are then described from real ones."""
    from layerzero.device.probe import probe_devices
    from layerzero.model.enums import Platform

    return spec.platform is not Platform.CPU and spec in probe_devices()


def known_names(names: Iterable[str], *, kernels: bool = False) -> None:
    """Raise, naming the nearest, unless every name is a backend's, or with `kernels` a kernel's."""
    from layerzero.dispatch.run import current_world
    from layerzero.errors import UnknownNameError, did_you_mean

    registry = current_world().registry
    backends = {*registry.backends, *(kernel.backend for kernel in registry.kernels.values())}
    for name in names:
        if name in backends or (kernels and name in registry.kernels):
            continue
        what, code = ("kernel or backend", "KERNEL_UNKNOWN") if kernels else ("backend", "BACKEND_NOT_INSTALLED")
        near = {*backends, *registry.kernels} if kernels else backends
        hint = did_you_mean(name, near, f"backends known here: {', '.join(sorted(backends))}")
        raise UnknownNameError(
            f"no {what} {name!r} is registered", code=code, value=name, limit=sorted(backends), hint=hint
        )
