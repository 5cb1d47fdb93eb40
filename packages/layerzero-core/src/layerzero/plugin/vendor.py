"""Is the vendor library here, and in a version the adapters work with? Decided from metadata only.

Importing a vendor is left to binding and to `layerzero.plugin.probing`, which does it in a subprocess.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.model.status import BackendStatus
from layerzero.plugin.discovery import dist_version
from layerzero.reasons import Reason, ReasonCategory, reason
from layerzero.registry.capabilities import Capabilities, load_capabilities

__all__ = ["hardware_reasons", "vendor_presence", "vendor_status"]


def vendor_presence(capabilities: Capabilities) -> tuple[str | None, tuple[Reason, ...], str]:
    """(installed version, reasons against it, exact fix); a backend without a vendor is always present."""
    vendor = capabilities.vendor
    if vendor is None:
        return None, (), ""
    fix = vendor.fix(capabilities.backend)
    installed = dist_version(vendor.dist)
    if installed is None:
        return None, (_say("BACKEND_NOT_INSTALLED", vendor.dist, fix.removeprefix("pip install "), fix),), fix
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        # A pre-release that is installed was somebody's choice; it counts.
        right = SpecifierSet(vendor.version).contains(installed, prereleases=True)
    except InvalidVersion:
        right = False
    if not right:
        return installed, (_say("BACKEND_VERSION_MISMATCH", f"{vendor.dist} {installed}", vendor.version, fix),), fix
    return installed, (), ""


def _say(code: str, value: str, limit: str, fix: str) -> Reason:
    plain = reason(code, value, limit)
    return Reason(plain.code, plain.message, plain.value, plain.limit, fix)


def hardware_reasons(spec: KernelSpec, device: DeviceSpec) -> list[Reason]:
    """Why a kernel can never run on a device, whatever the call."""
    found = spec.check(Context(op="any", device=device, dtype=min(spec.dtypes)))
    return [item for item in found if item.category is ReasonCategory.HARDWARE]


def vendor_status(capabilities: Capabilities | str | Path | Mapping[str, Any], device: DeviceSpec) -> BackendStatus:
    """The standard answer to `layerzero_capabilities`: vendor version, kernels usable on `device`, reason and fix."""
    known = capabilities if isinstance(capabilities, Capabilities) else load_capabilities(capabilities)
    version, reasons, fix = vendor_presence(known)
    if reasons:
        return BackendStatus(known.backend, False, version, (), reasons, fix)
    usable: list[str] = []
    against: list[Reason] = []
    for spec in known.kernels:
        problems = hardware_reasons(spec, device)
        against += [item for item in problems if item not in against]
        if not problems:
            usable.append(spec.kernel_id)
    if not known.kernels:
        against = [reason("BACKEND_STUB")]
    available = bool(usable)
    return BackendStatus(known.backend, available, version, tuple(usable), () if available else tuple(against), "")
