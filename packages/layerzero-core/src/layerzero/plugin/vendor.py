"""Is the vendor library here, does it work, and if not: the reason and the exact fix.

`vendor_presence` decides from metadata only; it runs in process, at discovery. `vendor_status` also imports the
vendor, because metadata cannot tell that an import fails: call it from `layerzero_capabilities` alone, which
`layerzero.plugin.probing` asks in a subprocess.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import importlib_metadata

from layerzero.device.memory import text_of
from layerzero.errors import one_line
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.discovery import dist_version, dist_version_on, install_hint, is_known, quoted
from layerzero.plugin.enclosure import Enclosure, inside, is_hidden
from layerzero.plugin.registrar import Registrar
from layerzero.plugin.spec import hookimpl
from layerzero.plugin.versions import contains
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.registry.capabilities import Capabilities, Conflict, Vendor, load_capabilities

# What a backend asks of the device and the installed packages beyond its descriptor: every reason against it.
Check = Callable[[DeviceSpec], Iterable[Reason]]


def vendor_presence(capabilities: Capabilities) -> tuple[str | None, tuple[Reason, ...], str]:
    """(installed version, reasons against it, exact fix); a backend without a vendor is always present."""
    vendor = capabilities.vendor
    if vendor is None:
        return None, (), ""
    fix = _fix(vendor, capabilities.backend)
    installed = dist_version(vendor.dist)
    reasons = _version_reasons(vendor.dist, installed, vendor.version, fix)
    if not reasons and (against := clashes(capabilities)):
        return installed, against, against[0].hint
    return installed, reasons, fix if reasons else ""


def presence_in(spec: BackendSpec, enclosure: Enclosure) -> BackendSpec:
    """A backend as its own process will find it: the vendor looked for there too, clashes with this process gone."""
    if not spec.vendor:
        return replace(spec, available=True, reasons=())
    installed = dist_version_on(spec.vendor, enclosure.path)
    command = install_hint(f"{spec.vendor}{spec.vendor_range}", spec.name)
    fix = f"add its folder to isolation.{spec.name}.path, or {command}"
    against = _version_reasons(spec.vendor, installed, spec.vendor_range, fix)
    return replace(spec, vendor_version=installed, available=not against, reasons=against)


def _fix(vendor: Vendor, backend: str) -> str:
    """How to get a right version: the author's command, the extra of the package that brings it, or the vendor."""
    if vendor.install:
        return quoted(vendor.install, vendor.dist, backend)
    package = f"layerzero-{backend}"
    if vendor.extra and is_known(package):
        return f"pip install '{package}[{vendor.extra}]'"
    return install_hint(f"{vendor.dist}{vendor.version}", backend)


def _version_reasons(dist: str, installed: str | None, version: str, fix: str) -> tuple[Reason, ...]:
    if installed is None:
        wanted = fix.removeprefix("pip install ") if fix.startswith("pip install ") else f"{dist}{version}"
        return (replace(reason("BACKEND_NOT_INSTALLED", dist, wanted), hint=fix),)
    if contains(version, installed):
        return ()
    return (replace(reason("BACKEND_VERSION_MISMATCH", f"{dist} {installed}", version), hint=fix),)


def needs_sm(min_sm: int | None = None, max_sm: int | None = None) -> Check:
    """A check for `vendor_status`: the SM version, where the device has one, lies in this range.

    For limits of the whole library; those of a kernel stand in its entry of capabilities.json.
    """

    def check(device: DeviceSpec) -> list[Reason]:
        anything = KernelSpec(
            "vendor.any.any",
            "any",
            "vendor",
            "vendor:any",
            platforms=frozenset({device.platform}),
            dtypes=frozenset({"float16"}),
            min_sm=min_sm,
            max_sm=max_sm,
            grid_layout="library",
        )
        return anything.check_device(device)

    return check


def needs_dist(dist: str, version: str = "", *, fix: str = "") -> Check:
    """A check for `vendor_status`: a second distribution the vendor works with, in this version range."""
    hint = functools.partial(install_hint, f"{dist}{version}", "the plugin")  # slow: only where it is wanted
    return lambda device: _version_reasons(dist, dist_version(dist), version, fix or hint())


def vendor_status(
    capabilities: Capabilities | str | Path | Mapping[str, Any], device: DeviceSpec, *checks: Check
) -> BackendStatus:
    """The standard answer to `layerzero_capabilities`: vendor version, kernels usable on `device`, reason and fix.

    A vendor that metadata shows in a right version is asked further: `checks` say what the descriptor cannot, then
    its module (`vendor.import`) is imported. Every reason found is reported; nothing of the vendor's escapes.
    """
    known = capabilities if isinstance(capabilities, Capabilities) else load_capabilities(capabilities)
    version, reasons, fix = vendor_presence(known)
    against: list[Reason] = list(reasons)
    if not reasons:
        against += [found for check in checks for found in _run_check(check, device)]
        against += _import_reasons(known.vendor, known.backend)
    usable: list[str] = []
    for spec in known.kernels if not against else ():
        problems = spec.check_device(device)
        against += [item for item in problems if item not in against]
        if not problems:
            usable.append(spec.kernel_id)
    if usable:
        return BackendStatus(known.backend, True, version, tuple(usable))
    if not known.kernels:
        if known.platforms and device.platform not in known.platforms:
            against.append(reason("PLATFORM_MISMATCH", device.platform, known.platforms))
        against.append(reason("BACKEND_STUB"))
    fix = fix or next((item.hint for item in against if item.hint), "")
    return BackendStatus(known.backend, False, version, (), tuple(against), fix)


def _run_check(check: Check, device: DeviceSpec) -> Iterable[Reason]:
    try:
        return tuple(check(device))
    except Exception as error:  # a check that cannot tell must not hide what the others found
        return (reason("VENDOR_REFUSED", one_line(error)),)


def _import_reasons(vendor: Vendor | None, backend: str) -> Iterable[Reason]:
    if vendor is None or vendor.module is None:
        return ()
    try:
        importlib.import_module(vendor.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some vendors end the process when torch is not the one they were built for
        hint = f"python -c 'import {vendor.module}' shows the whole error; {_fix(vendor, backend)}"
        behind = _behind_pth(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None
        why = ""
        if behind is not None:
            pth, place = behind
            why = f"{pth} leads to it, and .pth files are obeyed in site directories alone"
            hint = (
                f"add {place} to PYTHONPATH, call site.addsitedir({str(pth.parent)!r}), or install into site-packages"
            )
        return (replace(reason("BACKEND_IMPORT_FAILED", one_line(error), detail=why), hint=hint),)
    return ()


def _behind_pth(module: str) -> tuple[Path, Path] | None:
    """The .pth file that nobody obeyed and the folder it names, where that folder holds the missing module."""
    top = module.partition(".")[0]
    for entry in filter(os.path.isdir, sys.path):
        for pth in sorted(Path(entry).glob("*.pth")):
            for line in text_of(pth).splitlines():
                place = Path(entry, line.strip())
                if not line.strip() or line.startswith(("#", "import ", "import\t")) or str(place) in sys.path:
                    continue
                if (place / top).is_dir() or (place / f"{top}.py").is_file():
                    return pth, place
    return None


def backend_hooks(package: str | None, *checks: Check) -> tuple[Callable[..., Any], ...]:
    """`layerzero_register`, `layerzero_capabilities` and `layerzero_health` of the backend in this package.

    `checks` are those of `vendor_status`; the module `health` of the package has a `self_test`.
    """
    capabilities = Path(str(sys.modules[str(package)].__file__)).with_name("capabilities.json")

    @hookimpl
    def layerzero_register(registrar: Registrar) -> None:
        """Register the kernels of capabilities.json."""
        registrar.backend(capabilities)

    @hookimpl
    def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
        """The vendor, what the checks say, and which kernels fit the device."""
        return vendor_status(capabilities, device, *checks)

    @hookimpl
    def layerzero_health(backend: str) -> HealthReport:
        """Known-answer test."""
        found: HealthReport = importlib.import_module(f"{package}.health").self_test()
        return found

    return layerzero_register, layerzero_capabilities, layerzero_health


_MAX_BYTES = 1 << 16

# What cannot share a process (vendors built for another CUDA, packages that take each other's names) is decided from
# metadata and small files, without importing anything; inside an enclosure none of it applies: there the import tells.
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
