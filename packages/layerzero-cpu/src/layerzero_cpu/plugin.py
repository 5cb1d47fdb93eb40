"""Hooks of the CPU backend."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    ReasonCode,
    Registrar,
    dist_version,
    hookimpl,
    reason,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the backend from its descriptor."""
    registrar.backend(CAPABILITIES)


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """No vendor is needed; what other CPU libraries are here stands beside the reason."""
    status = vendor_status(CAPABILITIES, device)
    stub = reason("BACKEND_STUB", detail="; ".join(libraries()))
    reasons = tuple(stub if item.code is ReasonCode.BACKEND_STUB else item for item in status.reasons)
    return replace(status, reasons=reasons)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Nothing can be shown to be right before there is a kernel."""
    return HealthReport(backend, False, "no kernels to test yet")


def libraries() -> Iterator[str]:
    """One phrase for each CPU library: oneDNN inside torch, ZenDNN's zentorch, Intel's extension."""
    import torch

    built = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    usable = bool(torch.backends.mkldnn.is_available())
    yield f"oneDNN {built[1] if built else 'of unknown version'} in torch" if usable else "this torch has no oneDNN"
    zentorch = dist_version("zentorch")
    if zentorch is not None:
        try:  # its metadata names no version of torch, but a wrong one makes the import fail
            importlib.import_module("zentorch")
            yield f"zentorch {zentorch}"
        except (Exception, SystemExit) as error:
            yield f"zentorch {zentorch} cannot be imported: {type(error).__name__}: {error}"[:200]
    intel = dist_version("intel-extension-for-pytorch")
    if intel is not None:  # never imported: with any torch but its own it ends the process
        yield f"intel-extension-for-pytorch {intel} (archived; torch's own oneDNN is used instead)"
