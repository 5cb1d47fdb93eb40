"""Versions of the libraries that kernels come from, and the signature of the whole environment.

`DeviceSpec.signature` covers device, torch and driver. Stored timings also depend on the backends'
versions: `environment_signature` adds those. Versions are read from package metadata; nothing is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable

from layerzero.device.dists import installed_version
from layerzero.device.spec import DeviceSpec

VENDOR_DISTRIBUTIONS = (
    "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python", "intel-extension-for-pytorch", "kernels",
    "liger-kernel", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torchao", "triton", "xformers", "zentorch",
)  # fmt: skip


def backend_versions(
    distributions: Iterable[str] = VENDOR_DISTRIBUTIONS,
    *,
    read: Callable[[str], str | None] = installed_version,
) -> tuple[tuple[str, str], ...]:
    """(name, version) of those distributions that are installed, sorted. Broken metadata counts as not installed."""
    found: list[tuple[str, str]] = []
    for name in distributions:
        try:
            version = read(name)
        except Exception:  # metadata that some installer left half written
            continue
        if version:
            found.append((name, version))
    return tuple(sorted(found))


def environment_signature(spec: DeviceSpec) -> str:
    """Short stable hash of the device, torch, driver and backend versions."""
    text = json.dumps([spec.signature, list(spec.backend_versions)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
