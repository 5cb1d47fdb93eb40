"""Stand-ins: devices that are not here, entry points that are not installed, kernels that record their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.plugin.spec import hookimpl


def cpu(*features: str) -> DeviceSpec:
    """A CPU with these features."""
    return DeviceSpec(Platform.CPU, "cpu", name="fake CPU", cpu_features=frozenset(features), supports_bf16=True)


def gpu(sm: int, **given: Any) -> DeviceSpec:
    """A CUDA device of an SM version, 90 for SM 9.0."""
    return DeviceSpec.for_sm(sm, **given)


@dataclass(frozen=True)
class FakeDist:
    """What discovery reads of a distribution."""

    name: str
    version: str = "1.0"


@dataclass
class FakeEntryPoint:
    """An entry point whose `load` gives an object, or raises or does whatever a callable does."""

    name: str
    target: Any
    dist: FakeDist | None = None
    value: str = "fake.module"
    loads: int = 0

    def load(self) -> Any:
        """The target; a zero-argument function marked `loader` is called instead."""
        self.loads += 1
        if getattr(self.target, "is_loader", False):
            return self.target()
        return self.target


def loader(function: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function as something to call at load time, for faults during import."""
    function.is_loader = True  # type: ignore[attr-defined]
    return function


def capabilities(backend: str, *kernels: Mapping[str, Any], op: str = "rms_norm", **top: Any) -> dict[str, Any]:
    """A small valid descriptor; each kernel mapping only names what differs (`variant` gives the id)."""
    ops: dict[str, list[dict[str, Any]]] = {}
    for given in kernels or ({},):
        entry = dict(given)
        kernel_op = entry.pop("op", op)
        variant = entry.pop("variant", "plain")
        filled = {
            "kernel_id": f"{backend}.{kernel_op}.{variant}",
            "function": "layerzero_verify.testing.fakes:never_called",
            "dtypes": ["float32"],
        }
        ops.setdefault(kernel_op, []).append(filled | entry)
    return {"schema_version": "1.0", "backend": backend, "platforms": ["cpu"], "ops": ops} | top


def plugin(*descriptors: Mapping[str, Any], ops: Iterable[Any] = (), **hooks: Callable[..., Any]) -> Any:
    """A plugin object that registers descriptors and ops; further hooks are given by name."""

    @hookimpl
    def layerzero_register(registrar: Any) -> None:
        for descriptor in descriptors:
            registrar.backend(descriptor)
        for op in ops:
            registrar.op(op)

    made = SimpleNamespace(layerzero_register=layerzero_register)
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def never_called(*args: Any) -> Any:
    """The adapter of kernels that only take part in selection."""
    raise AssertionError("this kernel is for selection only")
