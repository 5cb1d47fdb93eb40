"""What a compiled kernel is compiled for: one artifact for each kernel, environment and values of its `jit_key`.

The version of the kernel and the signature of the environment (device, driver, torch, vendor libraries) are part of
the artifact's name, so that an upgrade leaves old artifacts behind instead of believing in them. A `CompileOrder` is
what a backend is asked to compile in a process that sees no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec

Artifact = tuple[str, tuple[str, ...]]
"""(kernel id, (version, environment, "field=value", …)), a plain value that JSON can hold."""


def artifact_of(kernel: KernelSpec, ctx: Context, environment: str) -> Artifact:
    """The artifact a kernel needs for a call; `environment` is the signature of the context's device."""
    values = (f"{name}={_word(ctx.get(name))}" for name in kernel.jit_key)
    return kernel.kernel_id, (kernel.version, environment, *values)


def words_of(artifact: Artifact) -> str:
    """The artifact for people: its kernel and the values it was compiled for."""
    kernel_id, (_, _, *values) = artifact
    return f"{kernel_id} ({', '.join(values)})" if values else kernel_id


def _word(value: Any) -> str:
    if isinstance(value, (frozenset, set)):
        return "+".join(sorted(str(item) for item in value))
    return str(value)


class NeedsDevice(RuntimeError):
    """Raised by a backend's `compiler`: this kernel is compiled only where the device is, since it is tuned there.

    It is left to `lz.warmup` then; with `in_thread` it is compiled by a thread of the process that has the device, as
    kernels without a `compiler` are.
    """

    def __init__(self, text: str, *, in_thread: bool = False) -> None:
        super().__init__(text)
        self.in_thread = in_thread


@dataclass(frozen=True, slots=True, eq=False)
class CompileOrder:
    """One kernel to compile for one call.

    A `compiler` that leaves shared libraries returns their paths: the process that serves maps them before the adapter
    loads them, without holding its interpreter.

    function  the kernel's adapter, "module:name"
    args      what the adapter would be called with, `kwargs` too: tensors are on torch's meta device
    context   the call, as `Context.to_json` writes it
    device    what to compile for; it is not here
    """

    kernel_id: str
    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Mapping[str, Any]
    device: DeviceSpec
    needs_grad: bool = field(default=False)

    def run(self) -> None:
        """Call the adapter on the meta tensors, backward too where the call would; for who has replaced the launch."""
        import torch

        adapter: Callable[..., Any] = resolve_name(self.function)
        try:
            with torch.set_grad_enabled(self.needs_grad):
                out = adapter(*self.args, **self.kwargs)
        except RuntimeError as error:
            if "meta tensor" in str(error):  # it reads numbers, and there are none
                raise NeedsDevice(f"{self.function} reads what its tensors hold") from error
            raise
        outs = [item for item in (out if isinstance(out, tuple) else (out,)) if isinstance(item, torch.Tensor)]
        wanted = [item for item in outs if item.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.empty_like(item) for item in wanted])
