"""The plugin: an op, and a backend with its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerzero.plugin import hookimpl, vendor_status

CAPABILITIES = Path(__file__).with_name("capabilities.json")
LAYERZERO_API = ">=2,<3"


@hookimpl
def layerzero_register(registrar: Any) -> None:
    """The op comes in by the same door as its kernels."""
    from layerzero_gated_norm.op import RMS_NORM_GATED

    registrar.op(RMS_NORM_GATED)
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: Any) -> Any:
    """No vendor is needed."""
    return vendor_status(CAPABILITIES, device)
