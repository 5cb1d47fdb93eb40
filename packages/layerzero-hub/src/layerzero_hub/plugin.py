"""Hooks of the Kernel Hub backend. Nothing is read before the first call or inspection asks for kernels."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.errors import LayerZeroError
from layerzero.plugin import (
    BackendStatus,
    DeviceSpec,
    HealthReport,
    ReasonCode,
    Registrar,
    hookimpl,
    reason,
    vendor_status,
)

CAPABILITIES = Path(__file__).with_name("capabilities.json")
DEFAULT_LOCK = "layerzero-hub.lock"
LOCK_ONE = "lz hub lock OWNER/NAME@VERSION"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the locked and mapped kernels; nothing is fetched, hashed or imported here.

    A broken policy, lock or mapping leaves the hub without kernels; `lz doctor` and `lz hub verify` say why.
    """
    base = json.loads(CAPABILITIES.read_text(encoding="utf-8"))
    registrar.backend(_with_kernels(base))


def _with_kernels(base: dict[str, Any]) -> dict[str, Any]:
    from layerzero import env
    from layerzero.policy.load import discover

    try:
        if not Path(DEFAULT_LOCK).is_file() and not discover(env.read(os.environ)):
            return base  # no lock at its own place, and no file that could name another
        from layerzero_hub.policy import discovered

        policy = discovered()
        if not policy.lock_path.is_file():
            return base
        from layerzero_hub import bound

        kernels, _ = bound.survey(policy)
        bound.remember(kernels, policy)
        return bound.capabilities(kernels, base)
    except (LayerZeroError, ImportError):
        return base  # `layerzero_capabilities` meets the same and reports it


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """The library `kernels`, and the state of policy, lock and store; the hub itself is not asked."""
    status = vendor_status(CAPABILITIES, device)
    # The package's own file holds no kernels: they come from lock and policy. That alone is no reason against it.
    against = tuple(item for item in status.reasons if item.code is not ReasonCode.BACKEND_STUB)
    if against:
        return replace(status, available=False, reasons=against)
    from layerzero_hub import bound
    from layerzero_hub.policy import discovered

    try:
        kernels, problems = bound.survey(discovered())
    except LayerZeroError as error:
        return replace(status, available=False, reasons=error.reasons, fix=error.hint)
    if not kernels and not problems:
        problems = (replace(reason("BACKEND_STUB"), message="no kernel is locked yet", hint=LOCK_ONE),)
    usable = tuple(sorted(name for name, kernel in kernels.items() if not kernel.refused))
    refused = (*problems, *(item for kernel in kernels.values() for item in kernel.refused))
    fix = refused[0].hint if refused else ""
    return replace(status, available=bool(kernels), kernels=usable, reasons=refused, fix=fix)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """Hash every locked build again and compare with the lock. Results are the conformance kit's business."""
    from layerzero_hub import installing, signing
    from layerzero_hub.policy import discovered

    try:
        policy = discovered()
        if not policy.lock_path.is_file():
            return HealthReport(backend, True, "nothing is locked")
        lock = signing.read_lock(policy)
        found = installing.verify(lock, policy)
    except LayerZeroError as error:
        return HealthReport(backend, False, str(error))
    bad = [finding for finding in found if not finding.ok]
    if bad:
        return HealthReport(backend, False, f"{bad[0].repo_id}@{bad[0].version}: {bad[0].reasons[0]}")
    return HealthReport(backend, True, f"{len(found)} locked builds verified")
