"""Hooks of the CPU backend."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    Reason,
    Registrar,
    dist_version,
    hookimpl,
    reason,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")
LIBRARY = Path(__file__).with_name("_native.abi3.so")


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the kernels; none where the package was installed without its library."""
    registrar.backend(CAPABILITIES if LIBRARY.exists() else _empty())


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """The library loads and has an instruction set of this machine; other CPU libraries stand beside a refusal."""
    if LIBRARY.exists():
        return vendor_status(CAPABILITIES, device, _loads)
    missing = reason("NATIVE_KERNELS_MISSING", f"{LIBRARY.name} is not there", detail="; ".join(libraries()))
    status = vendor_status(_empty(), device)
    reasons = tuple(missing if item.code == "BACKEND_STUB" else item for item in status.reasons)
    return replace(status, reasons=reasons, fix=missing.hint)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Known-answer test."""
    from layerzero_cpu.health import self_test

    return self_test()


def _empty() -> dict[str, object]:
    described: dict[str, object] = json.loads(CAPABILITIES.read_text(encoding="utf-8"))
    return described | {"ops": {}}


def _loads(device: DeviceSpec) -> list[Reason]:
    from layerzero.plugin import BackendNotAvailableError, InvalidInputError

    try:
        importlib.import_module("layerzero_cpu.library")
    except (BackendNotAvailableError, InvalidInputError) as error:
        return list(error.reasons)
    return []


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
