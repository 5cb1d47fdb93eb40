"""The three hooks of a built-in backend: its folder holds capabilities.json and a `health` with a `self_test`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Reason, Registrar, hookimpl, vendor_status


def hooks(package: str, *checks: Callable[[DeviceSpec], list[Reason]]) -> tuple[Callable[..., Any], ...]:
    """`layerzero_register`, `layerzero_capabilities` and `layerzero_health` of the backend in this package."""
    capabilities = Path(__file__).with_name(package.rpartition(".")[2]) / "capabilities.json"

    @hookimpl
    def layerzero_register(registrar: Registrar) -> None:
        """Register the kernels of capabilities.json."""
        registrar.backend(capabilities)

    @hookimpl
    def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
        """torch is always here; which kernels fit is in the descriptor."""
        return vendor_status(capabilities, device, *checks)

    @hookimpl
    def layerzero_health(backend: str) -> HealthReport:
        """Known-answer test."""
        found: HealthReport = importlib.import_module(f"{package}.health").self_test()
        return found

    return layerzero_register, layerzero_capabilities, layerzero_health
