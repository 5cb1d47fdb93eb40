"""The plugin under test, loaded step by step, so that each broken step can be named by its own test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pkgutil import resolve_name as import_string
from typing import Any

import importlib_metadata
import torch

from layerzero.errors import LayerZeroError, UnknownNameError
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.plugin.manager import call_hook, check_plugin
from layerzero.plugin.registrar import Registrar
from layerzero.plugin.spec import ENTRY_POINT_GROUP
from layerzero.plugin.vendor import vendor_presence
from layerzero.registry.capabilities import Capabilities
from layerzero_verify.testing.cases import declare

__all__ = ["Kit", "import_string", "operation", "uncompiled"]


def operation(op: str) -> OperationSpec | None:
    """An op by name, of the core or of a package that is installed."""
    import layerzero.ops  # noqa: F401 (importing it is what registers the built-in ops)
    from layerzero._ops.signature import public_op

    try:
        return public_op(op)
    except UnknownNameError:
        return None


def uncompiled(error: BaseException | None) -> str | None:
    """What an error says of a module its library may not compile, where it or what caused it is such an error."""
    while error is not None:
        if type(error).__name__ == "MissingJITCacheError":
            return str(error).partition(".")[0][:160]
        error = error.__cause__ or error.__context__
    return None


def _tried(step: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a step gives, or what it raises: a plugin may raise anything."""
    try:
        return step(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


@dataclass
class Kit:
    """One plugin, named by its entry point ("mybackend") or by its module ("layerzero_mybackend.plugin")."""

    target: str
    entry: importlib_metadata.EntryPoint | None = None
    plugin: Any = None
    load_error: BaseException | None = None
    hook_error: BaseException | None = None
    register_error: BaseException | None = None
    registrar: Registrar = field(default_factory=lambda: Registrar("unknown"))

    @classmethod
    def open(cls, target: str) -> Kit:
        """Load and register the plugin, keeping the first error of each step."""
        kit = cls(target)
        if "." in target or ":" in target:
            kit.entry = importlib_metadata.EntryPoint(name=target, value=target, group=ENTRY_POINT_GROUP)
        else:
            found = [e for e in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == target]
            kit.entry = found[0] if found else None
        if kit.entry is None:
            kit.load_error = LookupError(
                f"no entry point {target!r} in group {ENTRY_POINT_GROUP}; is the package installed?"
            )
            return kit
        kit.plugin, kit.load_error = _tried(kit.entry.load)
        if kit.load_error is not None:
            return kit
        _, kit.hook_error = _tried(lambda: check_plugin(kit.plugin, target))
        kit.registrar = Registrar(target)
        # An unknown hook must not hide what else is wrong, so registration is tried all the same.
        _, kit.register_error = _tried(lambda: call_hook(kit.plugin, "layerzero_register", registrar=kit.registrar))
        for name in {*kit.registrar.ops, *(spec.op for spec in kit.kernels)}:
            op = kit.operation(name)  # also of another plugin, whose op this one brings kernels for
            if isinstance(op, Op):
                declare(op)
        return kit

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return self.registrar.all_kernels()

    @property
    def capabilities(self) -> dict[str, Capabilities]:
        return self.registrar.backends

    def operation(self, op: str) -> OperationSpec | None:
        """The op of that name: one of the plugin's own, or a built-in one."""
        return self.registrar.ops.get(op) or operation(op)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        found = [torch.device("cuda", 0)] if torch.cuda.is_available() else []
        if torch.backends.mps.is_available():
            found.append(torch.device("mps"))
        return (*found, torch.device("cpu"))

    def device_for(self, spec: KernelSpec) -> tuple[torch.device, DeviceSpec] | str:
        """Where a kernel can be tried here, or why it cannot."""
        capabilities = self.capabilities.get(spec.backend)
        if capabilities is not None:
            _, reasons, fix = vendor_presence(capabilities)
            if reasons:
                return f"{reasons[0].message}; {fix}"
        why = f"needs {', '.join(sorted(spec.platforms))}"
        for device in self.devices:
            described = DeviceSpec.detect(device)
            problems = spec.check_device(described)
            if not problems:
                return device, described
            if described.platform in spec.platforms or spec.platforms == {Platform.CPU}:
                why = problems[0].message
        return why

    def function(self, spec: KernelSpec) -> Callable[..., Any]:
        found = import_string(spec.function)
        if not callable(found):
            raise TypeError(f"{spec.function} is not callable")
        return found  # type: ignore[no-any-return]

    def describe_error(self, error: BaseException) -> str:
        if isinstance(error, LayerZeroError):
            return str(error)
        return f"{type(error).__name__}: {error}"
