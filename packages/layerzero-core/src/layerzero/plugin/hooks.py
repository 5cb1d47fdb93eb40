"""The three hooks of a backend that needs nothing more: its folder holds capabilities.json and a `health`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.model.device import DeviceSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.registrar import Registrar
from layerzero.plugin.spec import hookimpl
from layerzero.plugin.vendor import Check, vendor_status


def backend_hooks(package: str | None, *checks: Check) -> tuple[Callable[..., Any], ...]:
    """`layerzero_register`, `layerzero_capabilities` and `layerzero_health` of the backend in this package.

    `checks` are those of `vendor_status`; the module `health` of the package has a `self_test`.
    """
    capabilities = Path(str(sys.modules[str(package)].__file__)).with_name("capabilities.json")

    @hookimpl
    def layerzero_register(registrar: Registrar) -> None:
        """Register the kernels of capabilities.json."""
        registrar.backend(capabilities)

    @hookimpl
    def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
        """The vendor, what the checks say, and which kernels fit the device."""
        return vendor_status(capabilities, device, *checks)

    @hookimpl
    def layerzero_health(backend: str) -> HealthReport:
        """Known-answer test."""
        found: HealthReport = importlib.import_module(f"{package}.health").self_test()
        return found

    return layerzero_register, layerzero_capabilities, layerzero_health
