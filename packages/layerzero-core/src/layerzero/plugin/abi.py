"""What cannot share a process: vendors built for another CUDA than this one, packages that take each other's names.

Decided from package metadata and small files, without importing anything. Inside an enclosure (a process started for
one backend) none of it applies: there the import itself tells.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import importlib_metadata

from layerzero.plugin.discovery import dist_version
from layerzero.plugin.enclosure import inside, is_hidden
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.registry.capabilities import Capabilities, Conflict, Vendor

_MAX_BYTES = 1 << 16

# Reasons that a process of its own would lift.
CLASHES = frozenset({ReasonCode.BACKEND_CONFLICT, ReasonCode.CUDA_VERSION_MISMATCH, ReasonCode.BACKEND_IMPORT_FAILED})


def clashes(capabilities: Capabilities) -> tuple[Reason, ...]:
    """Every reason why an installed vendor must not be imported into this process."""
    found = [_conflict(item, capabilities.backend) for item in capabilities.conflicts]
    if capabilities.vendor is not None and not inside():
        found.append(_cuda(capabilities.vendor, capabilities.backend))
    return tuple(item for item in found if item is not None)


def _isolate(backend: str) -> str:
    return f"set LAYERZERO_ISOLATION=auto, or isolation: {{{backend}: subprocess}} in the policy"


def _conflict(item: Conflict, backend: str) -> Reason | None:
    version = dist_version(item.dist)
    if version is None or is_hidden(item.module) or (item.unless is not None and dist_version(item.unless)):
        return None
    why = reason("BACKEND_CONFLICT", f"{item.dist} {version}", detail=item.why)
    return replace(why, hint=f"{_isolate(backend)}; or pip uninstall --yes {item.dist}")


def _cuda(vendor: Vendor, backend: str) -> Reason | None:
    """One CUDA in one process: a vendor built for another major version is kept out of it."""
    import torch

    here = torch.version.cuda
    built = None if vendor.build_file is None or here is None else _built_for(vendor)
    if built is None or here is None or built.partition(".")[0] == here.partition(".")[0]:
        return None
    detail = f"{vendor.dist} {dist_version(vendor.dist)} was built for CUDA {built}, this process has {here}"
    why = reason("CUDA_VERSION_MISMATCH", here, built, detail=detail)
    where = f"with the CUDA {built.partition('.')[0]} runtime on its LD_LIBRARY_PATH"
    return replace(why, hint=f"{_isolate(backend)}, {where}; or install a build for CUDA {here}")


def _built_for(vendor: Vendor) -> str | None:
    """The CUDA version a vendor's own file names: "12.8", or 1208 as the driver writes it. None where it is silent."""
    assert vendor.build_file is not None
    try:
        place = importlib_metadata.distribution(vendor.dist).locate_file(vendor.build_file)
        with open(str(place), "rb") as file:
            found: Any = json.loads(file.read(_MAX_BYTES))
        for key in vendor.build_cuda.split("."):
            found = found[key]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, importlib_metadata.PackageNotFoundError):
        return None
    if isinstance(found, int) and found >= 1000:
        return f"{found // 100}.{found % 100}"
    return found if isinstance(found, str) and found[:1].isdigit() else None
