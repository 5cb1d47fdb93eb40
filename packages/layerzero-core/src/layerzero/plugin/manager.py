"""Load every plugin alone, and turn what they register into one registry snapshot and a list of records.

pluggy isolates nothing: one raising implementation ends the whole call. So each entry point is loaded in
its own try, checked on a scratch plugin manager, and its `layerzero_register` called by itself; whatever goes
wrong costs that plugin and is written into its `PluginRecord` with reason and fix.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pluggy

from layerzero import env as environment
from layerzero.errors import LayerZeroError, PluginError, one_line
from layerzero.json_form import Plain
from layerzero.model.kernel import BackendSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.numerics.tolerances import classify
from layerzero.plugin import spec
from layerzero.plugin.discovery import Found, discover, forget_versions, kept_out
from layerzero.plugin.registrar import Registrar, check_api
from layerzero.plugin.vendor import vendor_presence
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.registry.capabilities import Capabilities, Vendor
from layerzero.registry.kernels import KernelRegistry
from layerzero.registry.proofs import beside

# With an op come opaque ops of torch that have its name and such an end.
_TORCH_ENDS = ("_backward", "_lse", "_lse_backward", "_quantized", "_quantized_backward", "_query", "_query_backward")


class PluginState:
    """The words a `PluginRecord.state` may be."""

    OK = "ok"  # registered, usable
    UNAVAILABLE = "unavailable"  # registered, but its vendor is absent or has a wrong version
    FAILED = "failed"  # broke the contract; nothing of it is registered
    DENIED = "denied"  # kept out by the environment


@dataclass(frozen=True, slots=True)
class PluginRecord(Plain):
    """How one plugin fared. `reasons` and `fix` are empty when its state is "ok"."""

    name: str
    dist: str = ""
    dist_version: str = ""
    state: str = PluginState.OK
    reasons: tuple[Reason, ...] = ()
    fix: str = ""
    kernels: tuple[str, ...] = ()
    module: str = ""
    backends: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    builtin: bool = False
    seconds: float = field(default=0.0, compare=False)
    _unshown: ClassVar = ("seconds",)


class HookView:
    """A plugin seen through its hooks alone.

    pluggy looks at every attribute of what it is given, slowly: with a dozen plugins that made up half of the time
    of a load.
    """

    def __init__(self, target: Any) -> None:
        if inspect.ismodule(target):
            found = vars(target)
        else:
            names = (name for name in dir(target) if not isinstance(getattr(type(target), name, None), property))
            found = {name: getattr(target, name, None) for name in names}
        vars(self).update({name: item for name, item in found.items() if _is_hook(name, item)})

    def __dir__(self) -> list[str]:
        return list(vars(self))


def _is_hook(name: str, item: Any) -> bool:
    if isinstance(item, type) or not callable(item):  # most of what a module holds; `isroutine` asks at length
        return False
    return inspect.isroutine(item) and (name.startswith("layerzero_") or hasattr(item, f"{spec.PROJECT}_impl"))


_SPEC = HookView(spec)


def _manager() -> pluggy.PluginManager:
    pm = pluggy.PluginManager(spec.PROJECT)
    pm.add_hookspecs(_SPEC)  # type: ignore[arg-type]  # any object will do, whatever pluggy's annotation says
    return pm


def load_plugins(
    entry_points: Iterable[Any] | None = None,
    env: environment.Env | Mapping[str, str] | None = None,
    core_ops: Container[str] = (),
) -> Loaded:
    """Discover and load all plugins, each alone. Never raises for a plugin's sake; Ctrl-C passes through.

    `entry_points` replaces what package metadata declares (the built-ins are always there); `env` the environment.
    A plugin that brings an op named like one of `core_ops`, or like that of an earlier plugin, is refused.
    """
    settings = env if isinstance(env, environment.Env) else environment.read(env)
    forget_versions()  # a package may have come or gone since the last load
    loaded = Loaded(core_ops)
    for item in discover(entry_points):
        started = time.perf_counter()
        record = loaded.load(item, settings)
        loaded.records += (replace(record, seconds=time.perf_counter() - started),)
    return loaded


class Loaded:
    """Everything discovery gave: the registry, the ops, one record per plugin, and in `pm` the plugins' hooks.

    It grows by whole plugins only.
    """

    def __init__(self, core_ops: Container[str]) -> None:
        self.core_ops = core_ops
        self.pm = _manager()
        self.registry = KernelRegistry()
        self.ops: dict[str, OperationSpec] = {}
        self.capabilities: dict[str, Capabilities] = {}
        self.plugin_of: dict[str, str] = {}
        self.records: tuple[PluginRecord, ...] = ()

    def record(self, name: str) -> PluginRecord | None:
        """The record of a plugin, or of the plugin that brought the backend of this name."""
        wanted = self.plugin_of.get(name, name)
        return next((item for item in self.records if item.name == wanted), None)

    def load(self, item: Found, env: environment.Env) -> PluginRecord:
        blank = PluginRecord(item.name, item.dist, item.version, module=item.entry.value, builtin=item.builtin)
        variable = kept_out(item, env)
        if variable is not None:
            why = reason("PLUGIN_DENIED", detail=variable)
            return replace(blank, state=PluginState.DENIED, reasons=(why,), fix=f"change {variable}")
        if self.pm.has_plugin(item.name):
            other = next(record.dist for record in self.records if record.name == item.name)
            error = PluginError(code="PLUGIN_DUPLICATE", value=item.name, limit=other or "another package")
            return _failed(blank, error, "PLUGIN_REGISTER_FAILED")
        code = "PLUGIN_IMPORT_FAILED"
        try:
            plugin = item.entry.load()
            code = "PLUGIN_REGISTER_FAILED"
            registrar, hooks = self._collect(item, plugin)
            return self._commit(item, hooks, registrar, blank)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and the like cost the plugin, not the process
            return _failed(blank, error, code)

    def _collect(self, item: Found, plugin: Any) -> tuple[Registrar, HookView]:
        hooks, alone = check_plugin(plugin, item.name)
        wanted = getattr(plugin, "LAYERZERO_API", None)
        if wanted is not None:
            check_api(str(wanted), f"plugin {item.name}")
        registrar = Registrar(item.name, item.version)
        _call(alone, "layerzero_register", registrar=registrar)
        registrar.close()
        for op_id in registrar.ops:
            for name in (
                op_id,
                *(op_id.removesuffix(end) for end in _TORCH_ENDS),
                *(op_id + end for end in _TORCH_ENDS),
            ):
                owner = "an earlier plugin" if name in self.ops else "layerzero-core" if name in self.core_ops else ""
                if owner:
                    text = f"op {name!r} exists already, and torch.ops.layerzero.{max(name, op_id, key=len)} with it"
                    raise PluginError(text, code="PLUGIN_DUPLICATE", value=op_id, limit=owner, hint="rename the op")
        return registrar, hooks

    def _commit(self, item: Found, hooks: HookView, registrar: Registrar, blank: PluginRecord) -> PluginRecord:
        registry = self.registry
        reasons: list[Reason] = []
        fixes: list[str] = []
        usable = False
        for capabilities in registrar.backends.values():
            backend, fix = _backend_spec(capabilities, item, empty=not registrar.all_kernels())
            registry = registry.add(capabilities.kernels, backend)
            reasons += backend.reasons
            fixes += [fix] if fix else []
            usable = usable or backend.available
        registry = registry.add(registrar.kernels.values()) if registrar.kernels else registry
        for op in registrar.ops.values():
            if isinstance(op, Op) and op.tolerance:
                classify(op.op_id, op.tolerance)
        # Nothing below raises: the plugin is in, whole.
        self.pm.register(hooks, item.name)
        self.registry = registry
        self.ops.update(registrar.ops)
        self.capabilities.update(registrar.backends)
        self.plugin_of.update(dict.fromkeys(registrar.backends, item.name))
        out = bool(registrar.backends) and not usable
        return replace(
            blank,
            state=PluginState.UNAVAILABLE if out else PluginState.OK,
            reasons=tuple(reasons),
            fix="; ".join(dict.fromkeys(fixes)),
            kernels=tuple(kernel.kernel_id for kernel in registrar.all_kernels()),
            backends=tuple(registrar.backends),
            ops=tuple(registrar.ops),
        )


def _backend_spec(capabilities: Capabilities, item: Found, *, empty: bool) -> tuple[BackendSpec, str]:
    vendor = capabilities.vendor or Vendor("")
    vendor_version, reasons, fix = vendor_presence(capabilities)
    if empty and not reasons:
        stub = reason("BACKEND_STUB")
        reasons, fix = (stub,), stub.hint
    made = BackendSpec(
        name=capabilities.backend,
        dist=item.dist,
        version=item.version or "0",
        vendor=vendor.dist,
        vendor_version=vendor_version,
        platforms=capabilities.platforms,
        available=not reasons,
        reasons=reasons,
        capabilities_hash=capabilities.hash,
        builtin=item.builtin,
        generations=capabilities.generations,
        vendor_range=vendor.version,
        isolation=capabilities.isolation,
        proofs=_beside(capabilities, "proofs"),
        measurements=_beside(capabilities, "measurements"),
        vendor_module=vendor.module or "",
    )
    return made, fix


def _beside(capabilities: Capabilities, what: str) -> str:
    """A file beside the descriptor: what the kit has shown, or was measured; read when a kernel is first asked for."""
    if not capabilities.source:
        return ""
    found = beside(capabilities.source, what)
    return str(found) if found.is_file() else ""


def check_plugin(plugin: Any, name: str) -> tuple[HookView, pluggy.PluginManager]:
    """The hooks of a plugin that keeps the contract, and a manager that has no other plugin.

    Refuses what the contract does not know: other names or arguments, wrappers, bare classes.
    """
    if inspect.isclass(plugin):
        raise PluginError(f"the entry point of {name} names a class", hint="name a module or an object")
    hooks = HookView(plugin)
    scratch = _manager()
    scratch.register(hooks, name)  # raises for arguments the hook does not have
    known = tuple(hook for hook in vars(spec) if hook.startswith("layerzero_"))
    for hook, caller in vars(scratch.hook).items():
        for impl in caller.get_hookimpls():
            if hook not in known:
                raise PluginError(code="PLUGIN_HOOK_UNKNOWN", value=hook, limit=", ".join(known))
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(f"{hook} is a hook wrapper", hint="plugins may not wrap the hooks of others")
    for attribute in dir(hooks):
        if attribute.startswith("layerzero_") and attribute not in known:
            raise PluginError(code="PLUGIN_HOOK_UNKNOWN", value=attribute, limit=", ".join(known))
        if attribute in known and not getattr(scratch.hook, attribute).get_hookimpls():
            raise PluginError(f"{attribute} is not marked", hint="write @hookimpl above it")
    return hooks, scratch


def call_hook(plugin: Any, hook: str, **arguments: Any) -> Any:
    """Call one plugin's own implementation of a hook, which may take fewer arguments; None when it has none."""
    scratch = _manager()
    scratch.register(plugin if isinstance(plugin, HookView) else HookView(plugin))
    return _call(scratch, hook, **arguments)


def _call(alone: pluggy.PluginManager, hook: str, **arguments: Any) -> Any:
    for impl in getattr(alone.hook, hook).get_hookimpls():
        return impl.function(*(arguments[argument] for argument in impl.argnames))
    return None


def _failed(blank: PluginRecord, error: BaseException, code: str) -> PluginRecord:
    """A record of what went wrong; our own errors keep their code, others become `code`."""
    if isinstance(error, LayerZeroError) and code != "PLUGIN_IMPORT_FAILED":
        why = Reason(error.code, error.body, error.reasons[0].value, error.reasons[0].limit, error.hint)
    else:
        why = reason(ReasonCode(code), one_line(error))
    fix = f"set LAYERZERO_PLUGINS_DENY={blank.name}"
    if blank.dist and why.code in (ReasonCode.PLUGIN_DUPLICATE, ReasonCode.KERNEL_DUPLICATE):
        fix = f"pip uninstall {blank.dist}, or set LAYERZERO_PLUGINS_DENY={blank.dist}"
    elif blank.dist:  # the distribution that declares the plugin; without one its name says nothing to pip
        fix = f"pip install --upgrade {blank.dist}, or {fix}"
    if why.hint and why.code.value.startswith("SCHEMA_"):  # its author reads this, too
        fix = f"correct its capabilities.json ({why.hint}), or {fix}"
    return replace(blank, state=PluginState.FAILED, reasons=(why,), fix=fix)
