"""What a plugin gets in `layerzero_register`: the only way in for ops and kernels.

A registrar only collects. The manager commits what it holds after the hook has returned, so a plugin
that raises half-way leaves nothing behind, and a registrar kept for later is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.errors import PluginError
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.plugin.discovery import dist_version
from layerzero.plugin.spec import API_VERSION
from layerzero.plugin.versions import contains
from layerzero.registry.capabilities import Capabilities, Vendor, load_capabilities
from layerzero.registry.fields import DEFAULT_API

__all__ = ["Registrar", "check_api"]


def check_api(wanted: str, who: str) -> None:
    """Raise PluginError when `wanted` (a version specifier) leaves this core's plugin API out."""
    if wanted != DEFAULT_API and not contains(wanted, API_VERSION):
        raise PluginError(
            f"{who} is written for plugin API {wanted}, this core has {API_VERSION}",
            code="PLUGIN_API_MISMATCH",
            value=API_VERSION,
            limit=wanted,
        )


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
            raise PluginError(
                code="KERNEL_ID_INVALID", value=spec.kernel_id, limit=f"{self.plugin}.{spec.op}.<variant>"
            )
        self._check_new(spec)
        self.kernels[spec.kernel_id] = spec

    def op(self, spec: OperationSpec) -> None:
        """Register a new op with its contract and fallback."""
        self._check_open()
        if not isinstance(spec, OperationSpec):
            raise PluginError(f"op() takes an OperationSpec, got {type(spec).__name__}", code="TYPE_INVALID")
        if spec.op_id in self.ops:
            raise PluginError(
                f"op {spec.op_id!r} was registered twice", code="PLUGIN_DUPLICATE", value=spec.op_id, limit=self.plugin
            )
        self.ops[spec.op_id] = spec

    def close(self) -> None:
        """End of the hook: later calls raise."""
        self._open = False

    def all_kernels(self) -> tuple[KernelSpec, ...]:
        """Everything collected so far."""
        described = (spec for loaded in self.backends.values() for spec in loaded.kernels)
        return (*described, *self.kernels.values())

    def _kernel_version(self, vendor: Vendor | None) -> str:
        """A kernel is as new as the library that computes, else as the package that brings it."""
        return (dist_version(vendor.dist) if vendor else None) or self.version or "0"

    def _check_open(self) -> None:
        if not self._open:
            raise PluginError(
                f"plugin {self.plugin} used its registrar after layerzero_register had returned",
                hint="register everything inside the hook",
            )

    def _check_new(self, *specs: KernelSpec) -> None:
        known = {other.kernel_id for other in self.all_kernels()}
        for spec in specs:
            if spec.kernel_id in known:
                raise PluginError(code="KERNEL_DUPLICATE", value=spec.kernel_id, limit=f"plugin {self.plugin}")
