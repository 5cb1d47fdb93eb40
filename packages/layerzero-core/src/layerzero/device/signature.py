"""Versions of the libraries that kernels come from, and the signature of the whole environment.

`DeviceSpec.signature` covers device, torch and driver. Stored timings also depend on the backends' versions:
`environment_signature` adds those. Versions are read from the head of metadata files, a few lines: importlib_metadata
parses whole files, descriptions and all, which takes ten milliseconds for torch's and five more for its import.
"""

from __future__ import annotations

import os
import platform as host
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import importlib_metadata

from layerzero.device.spec import DeviceSpec, Platform
from layerzero.json_form import digest


def installed_version(dist: str) -> str | None:
    """The version of the first distribution of the name on the path that has one; None when it is not installed.

    The folder that an uninstall left behind has none.
    """
    found = importlib_metadata.distributions(name=dist, path=there(tuple(sys.path)))
    return next((version for item in found if (version := identity(item)[1])), None)


@lru_cache(maxsize=4)
def there(path: tuple[str, ...]) -> list[str]:
    """The folders of a path that exist; importlib_metadata takes others for zip files, again at each question."""
    return [place for place in path if os.path.exists(place or os.curdir)]


def identity(dist: Any) -> tuple[str, str]:
    """Name and version of a distribution object; empty where its metadata does not say."""
    found: dict[str, str] = {}
    read = getattr(dist, "read_text", None)
    try:
        text = (read("METADATA") or read("PKG-INFO") or "") if read is not None else ""
        for line in text.splitlines():
            if not line:
                break
            key, _, value = line.partition(":")
            if key in ("Name", "Version"):
                found[key] = value.strip()
        name, version = found.get("Name"), found.get("Version")
        return name or str(getattr(dist, "name", "") or ""), version or str(getattr(dist, "version", "") or "")
    except Exception:  # broken metadata of one distribution must not hide the others
        return found.get("Name", ""), found.get("Version", "")


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
    found: dict[str, str | None] = {}
    for name in distributions:
        with suppress(Exception):  # metadata that some installer left half written
            found[name] = read(name)
    return tuple(sorted((name, version) for name, version in found.items() if version))


def environment_signature(spec: DeviceSpec) -> str:
    """Short stable hash of the device, torch, driver and backend versions."""
    return digest([spec.signature, list(spec.backend_versions)])[:16]


# A kernel that was right on one member of a family of devices may be trusted on the others.
# The levels of x86-64 that compilers know, and the tiles of AMX above them: kernels have code of their own for each.
_V4 = frozenset({"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"})
_X86 = (
    ("v4-amx", _V4 | {"amx_tile", "amx_bf16", "amx_int8"}),
    ("v4", _V4),
    ("v3", frozenset({"avx2", "fma3"})),
)
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def family_of(device: DeviceSpec) -> str:
    """ "sm90", "gfx942", "cpu-x86_64-v4-amx", "cpu-aarch64-sve", else the kind of device and its vendor."""
    if device.sm_version is not None:
        return f"sm{device.sm_version}"
    if device.gfx is not None:
        return device.gfx
    if device.platform is not Platform.CPU:
        return f"{device.device_type}-{device.vendor}"
    machine = host.machine().lower()
    machine = _MACHINES.get(machine, machine)
    if machine == "x86_64":
        level = next((name for name, needs in _X86 if needs <= device.cpu_features), "v2")
        return f"cpu-x86_64-{level}"
    return f"cpu-{machine}-sve" if "sve" in device.cpu_features else f"cpu-{machine}"
