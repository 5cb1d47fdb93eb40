"""The hooks of this package: four ops, and the backend of its own kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl, vendor_status
from layerzero_linear_attention.build import LIBRARY
from layerzero_linear_attention.ops import OPS

LAYERZERO_API = ">=2,<3"
CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the ops, whose references and baselines come with them, and the kernels that were compiled."""
    for op in OPS:
        registrar.op(op)
    registrar.backend(_capabilities())


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """No vendor is needed; a package made without a compiler has no kernels for CPUs."""
    return vendor_status(_capabilities(), device)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero_linear_attention.health import self_test

    return self_test()


def _capabilities() -> Path | dict[str, Any]:
    """The descriptor; without the library, what it says of kernels for GPUs."""
    if LIBRARY.exists():
        return CAPABILITIES
    described: dict[str, Any] = json.loads(CAPABILITIES.read_text(encoding="utf-8"))
    ops = {op: [item for item in kernels if "cpu" not in item["platforms"]] for op, kernels in described["ops"].items()}
    return described | {"ops": {op: kernels for op, kernels in ops.items() if kernels}}
