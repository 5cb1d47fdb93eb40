"""What a plugin gets in `layerzero_register`: the only way in for ops and kernels.

A registrar only collects. The manager commits what it holds after the hook has returned, so a plugin
that raises half-way leaves nothing behind, and a registrar kept for later is closed.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerzero.errors import PluginError
from layerzero.model.enums import OpKind, Platform
from layerzero.model.formula import Formula
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.plugin.discovery import dist_version
from layerzero.plugin.spec import API_VERSION
from layerzero.plugin.versions import contains
from layerzero.registry.capabilities import Capabilities, Vendor, load_capabilities
from layerzero.registry.fields import DEFAULT_API

_NAMED = ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def check_api(wanted: str, who: str) -> None:
    """Raise PluginError when `wanted` (a version specifier) leaves this core's plugin API out."""
    if wanted != DEFAULT_API and not contains(wanted, API_VERSION):
        text = f"{who} is written for plugin API {wanted}, this core has {API_VERSION}"
        raise PluginError(text, code="PLUGIN_API_MISMATCH", value=API_VERSION, limit=wanted)


def check_op(op: Op) -> None:
    """Refuse an op that no function `lz.ops.NAME` can be written for, or whose formula no kernel's call fits."""
    given = op.signature.parameters
    kinds = ("POSITIONAL_OR_KEYWORD",) if op.reference is op.function and "backend" not in given else _NAMED
    plain = op.arguments and all(p.kind.name in kinds and not p.name.startswith("_") for p in given.values())
    named = re.fullmatch(r"[a-z][a-z0-9_]{0,63}", op.op_id) and not keyword.iskeyword(op.op_id)
    for right, needed in (
        (named, "a name of lowercase letters, digits and underscores that is no keyword of Python"),
        (callable(op.describe), "a function `describe`: (Call) -> Context"),
        (plain, "parameters that go by position or by name, none of which begins with an underscore"),
    ):
        if not right:
            text = f"op {op.op_id[:70]!r}, {op.signature}: it needs {needed}"
            raise PluginError(text, code="VALUE_INVALID", value=op.op_id, limit=needed, hint=f"give it {needed}")


def kernels_of(op: Op, version: str) -> Iterator[KernelSpec]:
    """The kernels that come with an op: its reference, and what a torch user writes."""
    for variant, backend, function, priority, workspace in (
        ("plain", "reference", op.reference, -10.0, op.workspace),
        ("baseline", "torch", op.baseline, 0.0, op.baseline_workspace),
    ):
        if function is None or (variant == "plain" and op.fallback_id != f"reference.{op.op_id}.plain"):
            continue  # a reference that the plugin registers as a kernel of its own
        yield KernelSpec(
            kernel_id=f"{backend}.{op.op_id}.{variant}",
            op=op.op_id,
            backend=backend,
            function=_path(op, function),
            version=version or "0",
            platforms=frozenset(Platform),
            dtypes=_FLOATS,
            features=frozenset({*op.features, "mixed_weight", *(("backward",) if op.op_kind is OpKind.TENSOR else ())}),
            priority=priority,
            mixed_dtypes=True,
            graph_safe=True,
            deterministic=True,
            grid_layout="library",
            workspace=Formula(workspace) if workspace else None,
            tp_invariant=op.tp_invariant and variant == "plain",
        )


def _path(op: Op, function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if "<" in function.__qualname__:
        text = f"op {op.op_id!r}: {function.__qualname__} cannot be imported by name"
        raise PluginError(text, code="TYPE_INVALID", value=function.__qualname__, limit="a function of a module")
    return f"{function.__module__}:{function.__qualname__}"


class Registrar:
    """Collects the backends, kernels and ops of one plugin; `version` is that of its distribution."""

    def __init__(self, plugin: str, version: str = "") -> None:
        self.plugin = plugin
        self.version = version
        self.backends: dict[str, Capabilities] = {}
        self.kernels: dict[str, KernelSpec] = {}
        self.ops: dict[str, OperationSpec] = {}
        self._open = True

    def backend(self, capabilities: str | Path | Mapping[str, Any]) -> Capabilities:
        """Register a backend and all its kernels from a capabilities.json (or the same as a mapping).

        Raises CapabilitiesError for a wrong file and PluginError for a wrong API version or a repetition.
        """
        self._check_open()
        loaded = load_capabilities(capabilities, version=self._kernel_version)
        check_api(loaded.api, f"backend {loaded.backend}")
        if loaded.backend in self.backends:
            raise PluginError(code="PLUGIN_DUPLICATE", value=loaded.backend, limit=f"plugin {self.plugin}")
        self._check_new(*loaded.kernels)
        self.backends[loaded.backend] = loaded
        return loaded

    def kernel(self, spec: KernelSpec) -> None:
        """Register one kernel built in code, for what a descriptor cannot say.

        Its id begins with a backend of this plugin, or with the plugin's own name.
        """
        self._check_open()
        if not isinstance(spec, KernelSpec):
            raise PluginError(f"kernel() takes a KernelSpec, got {type(spec).__name__}", code="TYPE_INVALID")
        prefix = spec.kernel_id.split(".")[0]
        if prefix != spec.backend or (spec.backend not in self.backends and spec.backend != self.plugin):
            limit = f"{self.plugin}.{spec.op}.<variant>"
            raise PluginError(code="KERNEL_ID_INVALID", value=spec.kernel_id, limit=limit)
        self._add_kernels(spec)

    def op(self, spec: OperationSpec) -> None:
        """Register a new op: it is called as `lz.ops.NAME`. Its reference and its baseline become kernels of it."""
        self._check_open()
        if not isinstance(spec, OperationSpec):
            raise PluginError(f"op() takes an Op, got {type(spec).__name__}", code="TYPE_INVALID")
        if spec.op_id in self.ops:
            text = f"op {spec.op_id!r} was registered twice"
            raise PluginError(text, code="PLUGIN_DUPLICATE", value=spec.op_id, limit=self.plugin)
        if isinstance(spec, Op):
            check_op(spec)
            self._add_kernels(*kernels_of(spec, self.version))
        self.ops[spec.op_id] = spec

    def close(self) -> None:
        """End of the hook: later calls raise."""
        self._open = False

    def all_kernels(self) -> tuple[KernelSpec, ...]:
        described = (spec for loaded in self.backends.values() for spec in loaded.kernels)
        return (*described, *self.kernels.values())

    def _kernel_version(self, vendor: Vendor | None) -> str:
        """A kernel is as new as the library that computes, else as the package that brings it."""
        return (dist_version(vendor.dist) if vendor else None) or self.version or "0"

    def _check_open(self) -> None:
        if not self._open:
            text = f"plugin {self.plugin} used its registrar after layerzero_register had returned"
            raise PluginError(text, hint="register everything inside the hook")

    def _add_kernels(self, *specs: KernelSpec) -> None:
        self._check_new(*specs)
        self.kernels.update((spec.kernel_id, spec) for spec in specs)

    def _check_new(self, *specs: KernelSpec) -> None:
        known = {other.kernel_id for other in self.all_kernels()}
        for spec in specs:
            if spec.kernel_id in known:
                raise PluginError(code="KERNEL_DUPLICATE", value=spec.kernel_id, limit=f"plugin {self.plugin}")
