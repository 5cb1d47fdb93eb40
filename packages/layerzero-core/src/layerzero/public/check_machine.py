"""Doctor's look at the machine: versions, devices, variables, policy files, breakers and quarantine."""

from __future__ import annotations

import platform as host
from collections.abc import Iterable
from pathlib import Path

import importlib_metadata
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from layerzero.device.signature import family_of
from layerzero.health.quarantine import Quarantine, QuarantineEntry
from layerzero.measurements.database import database
from layerzero.measurements.shipped import standing
from layerzero.model.config import Policy
from layerzero.model.decision import brief
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Platform
from layerzero.plugin.discovery import CORE_DIST, dist_version
from layerzero.policy.load import discover, mistakes
from layerzero.policy.rules import matches_any
from layerzero.public.checks import Check, Situation, Status, verdict_on
from layerzero.reasons import ReasonCode, reason
from layerzero.runtime.crashes import place, set_aside
from layerzero.runtime.state import state

# The libraries by their import names, and the distributions that bring those that are not called like them.
_LIBRARIES = (
    "torch",
    "triton",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flashinfer",
    "xformers",
    "liger_kernel",
    "transformers",
    "pytest",
    "hypothesis",
)
_BROUGHT_BY = {"triton": ("triton", "pytorch-triton"), "flashinfer": ("flashinfer-python",)}
_FLOORS = {"python": ">=3.11", "torch": ">=2.10"}
# The minor releases that our tests have run on; docs/compatibility.toml says which patches.
_MET = {"python": ("3.11", "3.12"), "torch": ("2.11", "2.13")}


def libraries() -> dict[str, str | None]:
    """Versions of what kernels and tests stand on, from metadata; an absent one is None and never an error."""
    found: dict[str, str | None] = {"python": host.python_version()}
    for name in _LIBRARIES:
        found[name] = next(filter(None, map(_version, _BROUGHT_BY.get(name, (name,)))), None)
    found["torch"] = str(torch.__version__)
    found["cuda"] = torch.version.cuda
    found["rocm"] = torch.version.hip
    return found


def _version(dist: str) -> str | None:
    try:
        return dist_version(dist)
    except Exception:  # metadata that some installer left half written is as good as none
        return None


def supported() -> dict[str, str]:
    """The ranges this core declares for Python and torch, from its own package metadata."""
    ranges = dict(_FLOORS)
    try:
        metadata = importlib_metadata.distribution(CORE_DIST).metadata
    except importlib_metadata.PackageNotFoundError:  # run from its source tree
        return ranges
    if metadata is None:
        return ranges
    ranges["python"] = metadata.get("Requires-Python") or ranges["python"]
    for text in metadata.get_all("Requires-Dist") or ():
        wanted = Requirement(text)
        if wanted.name == "torch" and wanted.marker is None and wanted.specifier:
            ranges["torch"] = str(wanted.specifier)
    return ranges


def platform(now: Situation) -> list[Check]:
    """Python, torch, and every device."""
    ranges = supported()
    return [
        _in_range("python", host.python_version(), ranges["python"], f"install Python {ranges['python']}"),
        _in_range("torch", str(torch.__version__), ranges["torch"], f"pip install 'torch{ranges['torch']}'"),
        *(_device(spec) for spec in now.devices),
    ]


def _in_range(name: str, version: str, wanted: str, fix: str) -> Check:
    try:
        right = SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        right = False
    if right and any(SpecifierSet(f"=={met}.*").contains(Version(version), prereleases=True) for met in _MET[name]):
        return Check("platform", name, Status.OK, f"{version} (supported: {wanted})")
    if right:
        message = f"{version} (supported: {wanted}; tested: {', '.join(_MET[name])})"
        return Check("platform", name, Status.WARN, message, fix="lz verify --lane quick compares every kernel here")
    return Check.because(
        "platform", name, Status.FAIL, reason("BACKEND_VERSION_MISMATCH", f"{name} {version}", wanted), fix
    )


def _device(spec: DeviceSpec) -> Check:
    cpu, sm = spec.platform is Platform.CPU, spec.sm_version
    parts = [
        spec.name or spec.device_type,
        "" if sm is None else f"SM {sm // 10}.{sm % 10} {spec.gpu_generation.name.lower()}",
        spec.gfx,
        f"{spec.memory_bytes / 2**30:.0f} GiB" if spec.memory_bytes else "",
        f"driver {spec.driver_version}" if spec.driver_version else "",
        (" ".join(sorted(spec.cpu_features)) or "no vector features known") if cpu else "",
    ]
    name = "cpu" if cpu else f"{spec.device_type}:{spec.index}"
    return Check("platform", f"device {name}", Status.OK, ", ".join(filter(None, parts)))


# -- measurements that came with packages ---------------------------------------------------------------------------
_SHIPPED = "shipped measurements"


def shipped(now: Situation, only: str | None = None) -> list[Check]:
    """One check for each available backend and family of devices that its file has something to say of."""
    if not now.world.policy.setting("perfdb.shipped"):
        return [Check(_SHIPPED, "perfdb.shipped", Status.OK, "off: kernels without times here are ranked by priority")]
    found = []
    for name, backend in sorted(now.world.registry.backends.items()):
        if only not in (None, name) or not backend.available:
            continue
        for family in sorted({family_of(device) for device in now.devices}):
            own, why = standing(backend, family)
            if why is not None:
                # Rates of other devices still count, which is as it should be; nothing else of a refused file does.
                found.append(Check.because(_SHIPPED, name, Status.WARN if own is None else Status.OK, why))
            elif own is not None:
                words = f"{own.calls} calls on {family}: {own.device}, commit {brief(own.commit)}, torch {own.torch}"
                found.append(Check(_SHIPPED, name, Status.OK, words))
    return found


def measured(now: Situation) -> Iterable[Check]:
    """The database of the times that were measured here, and what became of damaged ones."""
    db = database(now.world.policy)
    if db is None or not db.path.exists():
        return
    group, name, rows = "measured times", db.path.name, len(db)
    if not db.problems:
        yield Check(group, name, Status.OK, f"{rows} rows in {db.path}")
    yield from (Check.because(group, name, Status.WARN, why) for why in db.problems)
    for kept in sorted(db.path.parent.glob(f"{name}.corrupt-{'?' * 32}")):
        fix = "lz tune measures anew what is lost; then remove the file"
        yield Check(group, name, Status.WARN, f"was damaged, and set aside as {kept}", ReasonCode.CACHE_CORRUPT, fix)


# -- settings ----------------------------------------------------------------------------------------------------
def settings(now: Situation) -> list[Check]:
    """Variables that are wrong or unknown, and every policy file."""
    checks = [Check.error("settings", "variable", error) for error in now.wrong]
    checks += misspelt("settings", now, Status.WARN, "unset it, or check its spelling")
    if not checks:
        count = sum(name.startswith("LAYERZERO_") for name in now.environ)
        checks.append(Check("settings", "variables", Status.OK, f"{count} LAYERZERO_* set" if count else "none set"))
    return [*checks, *_policy_files(now)]


def misspelt(group: str, now: Situation, status: str, otherwise: str = "") -> Iterable[Check]:
    """Variables that the core does not know: `status` where one is like ours, else a warning, for a plugin's own."""
    for name, similar in now.env.unknown:
        message = f"{name} is not known to the core and has no effect there"
        how, fix = (status, f"did you mean {similar}?") if similar else (Status.WARN, otherwise or f"unset {name}")
        yield Check(group, "variable", how, message, ReasonCode.CONFIG_INVALID, fix)


def _policy_files(now: Situation) -> list[Check]:
    checks: list[Check] = []
    for found in discover(now.env):
        wrong = mistakes(found.path, trusted=found.trusted)
        trust = "" if found.trusted else " (in the working directory)"
        fine = Check("settings", "policy file", Status.OK, f"{found.path}{trust}")
        checks += [Check.error("settings", "policy file", error) for error in wrong] or [fine]
    told = {check.message for check in checks if check.status == Status.FAIL}
    if now.problem is not None:
        merged = Check.error("settings", "policy", now.problem)
        return checks if merged.message in told else [*checks, merged]
    return checks or [Check("settings", "policy file", Status.OK, "none found; defaults hold")]


# -- health ------------------------------------------------------------------------------------------------------
def health(now: Situation, policy: Policy | None = None) -> list[Check]:
    """Open breakers, kernels that could not be bound, and the quarantine file.

    An entry that keeps nothing from running is listed as such: `policy` (default: the one in force) keeps its kernel
    out anyway, or this machine has another version of it or another device.
    """
    kept = place()
    away = () if kept is None else _quarantine(now, kept, policy or now.world.policy)
    lost = [(f"device {device}", why) for device, why in state.lost.items()]
    gone, unbindable = (
        [Check.because("health", name, Status.FAIL, why) for name, why in found]
        for found in (lost, now.world.unbindable.items())
    )
    checks = [*gone, *_breakers(now), *unbindable, *_canaries(now), *away]
    return checks or [Check("health", "breakers", Status.OK, "all closed, nothing in quarantine")]


def _canaries(now: Situation) -> Iterable[Check]:
    from layerzero.dispatch.canary import trials

    wanted = now.world.policy.setting("canary.calls")
    for kernel_id, good in trials().items():
        yield Check("health", f"canary {kernel_id}", Status.OK, f"{good} of {wanted} comparisons were good")
    for kernel_id, wrong in now.world.trials.items():
        if wrong:
            yield Check.because("health", f"canary {kernel_id}", Status.WARN, reason("CANARY_FAILED", wrong))
        else:
            yield Check("health", f"canary {kernel_id}", Status.OK, "promoted")


def _breakers(now: Situation) -> Iterable[Check]:
    health = now.world.health
    for kind, states in (("kernel", health.kernels), ("backend", health.backends)):
        for name, breaker in states.items():
            if breaker.watched or breaker.blocks:
                why = reason("CIRCUIT_OPEN", breaker.last_error, health.settings.cooldown_s, detail=breaker.phase.value)
                yield Check.because("health", f"{kind} {name}", Status.WARN, why)


def _quarantine(now: Situation, path: Path, policy: Policy) -> Iterable[Check]:
    quarantine = Quarantine(path)
    try:
        entries = quarantine.entries()
    except OSError as error:
        why = reason("CACHE_CORRUPT", f"{path.name}: {error.strerror}")
        yield Check.because("health", "quarantine", Status.WARN, why, "make the file readable, or remove it")
        return
    for problem in (*set_aside(path), *quarantine.problems):
        yield Check.because("health", "quarantine", Status.WARN, problem)
    for entry in entries:
        what = f"{entry.kernel_id} {entry.version}: {entry.code} {entry.detail}".rstrip()
        spent = _spent(entry, now, policy)
        status = Status.OK if spent else Status.WARN
        why = reason("QUARANTINED", what, detail=f"not in force: {spent}" if spent else "")
        yield Check.because("health", "quarantine", status, why, f"lz quarantine clear {entry.kernel_id}")


def _spent(entry: QuarantineEntry, now: Situation, policy: Policy) -> str | None:
    """Why an entry keeps nothing from running here, or None where it does."""
    kernel = now.world.registry.kernels.get(entry.kernel_id)
    if kernel is None:
        return "no longer installed"
    if kernel.version != entry.version:
        return f"replaced by version {kernel.version}"
    if entry.device_signature not in {device.signature for device in now.devices}:
        return "of a device that is not here"
    verdict = verdict_on(kernel, policy)
    if verdict.denied_by is not None:
        return f"denied by the policy: {verdict.denied_by}"
    lists = [rule.allow for rule in policy.program if rule.when and rule.allow]
    if not verdict.allowed and not any(matches_any(names, kernel.kernel_id, kernel.backend) for names in lists):
        return "not in the policy's allow list"
    return None
