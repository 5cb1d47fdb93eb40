"""Doctor's look at plugins and vendors: what metadata says, and what a probe in another process finds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

from layerzero.device.spec import Platform
from layerzero.errors import did_you_mean
from layerzero.isolation.worker import settings_for
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.plugin.discovery import dist_version, is_known
from layerzero.plugin.manager import PluginRecord, PluginState, load_plugins
from layerzero.plugin.probing import ProbeResult, probe
from layerzero.public.checks import Check, Situation, Status, some_of, verdict_on
from layerzero.reasons import ReasonCategory, ReasonCode, reason
from layerzero.registry.capabilities import Capabilities
from layerzero.runtime.proof_registry import proof_registry

# The reasons of two plugins that want the same name.
_CLASHES = (ReasonCode.PLUGIN_DUPLICATE, ReasonCode.KERNEL_DUPLICATE)
# (distribution, must agree with, how many parts of the version): pairs whose mismatch breaks at import or at run time.
_PAIRS = (
    ("flashinfer-cubin", "flashinfer-python", 3),
    ("flashinfer-jit-cache", "flashinfer-python", 3),
    ("intel-extension-for-pytorch", "torch", 2),
)


def plugins(now: Situation, only: str | None = None) -> list[Check]:
    """One check per plugin: did it load, and if not, why."""
    return [_plugin(record, now) for record in now.records if _wanted(record, only)]


def _wanted(record: PluginRecord, only: str | None) -> bool:
    return only is None or only == record.name or only in record.backends


def _plugin(record: PluginRecord, now: Situation) -> Check:
    origin = f"{record.dist or 'unknown package'} {record.dist_version}".strip()
    count = len(record.kernels)
    brings = f"{origin}, {count} kernel{'' if count == 1 else 's'}"
    if record.state == PluginState.OK:
        return Check("plugins", record.name, Status.OK, brings)
    why = record.reasons[0]
    if record.state == PluginState.UNAVAILABLE:
        if record.backends and all(backend in now.world.enclosed for backend in record.backends):
            return Check("plugins", record.name, Status.OK, f"{brings}, in a process of their own")
        # Which library, and how to get it, stands at each of its backends.
        what = "no kernels yet" if why.code is ReasonCode.BACKEND_STUB else "vendor library missing or unfit"
        return Check("plugins", record.name, Status.WARN, f"{brings}; {what}", why.code)
    status = Status.SKIP if record.state == PluginState.DENIED else Status.FAIL
    return Check("plugins", record.name, status, f"{why.message} ({origin})", why.code, record.fix or why.hint)


def unknown(now: Situation, name: str) -> list[Check]:
    """The answer for a name that no plugin and no backend bears."""
    known = sorted({record.name for record in now.records} | set(now.world.registry.backends))
    package = f"layerzero-{name}"
    ours = is_known(package)  # and not installed; a name nobody bears is no name to hand to pip
    fix = f"pip install {package}" if ours else did_you_mean(name, known, f"known here: {', '.join(known)}")
    why = reason("BACKEND_NOT_INSTALLED", package if ours else name)
    return [Check.because("plugins", name, Status.FAIL, why, fix)]


# -- vendors -----------------------------------------------------------------------------------------------------
def vendors(now: Situation, only: str | None, timeout: float | None) -> list[Check]:
    """One check per backend of every plugin that loaded; `timeout` None takes package metadata at its word.

    A few are probed at a time, each in its own process. A vendor that is neither installed nor importable is not
    there, and no process need be started to learn it.
    """
    named = [
        (record, backend)
        for record in now.records
        if _wanted(record, only) and record.state in (PluginState.OK, PluginState.UNAVAILABLE)
        for backend in record.backends or (record.name,)
        if only in (None, record.name, backend)
    ]
    specs = {**now.world.registry.backends, **now.world.enclosed}
    if timeout is None:
        return [_isolated(now, backend, _promise(backend, specs.get(backend), now.device)) for _, backend in named]
    known = load_plugins(env=now.env).capabilities if named else {}
    asked = [backend for _, backend in named if not _absent(specs.get(backend), known.get(backend))]

    def ask(backend: str) -> ProbeResult:
        if backend not in now.world.enclosed:
            return probe(backend, timeout, device=now.device, env=now.environ)
        how = settings_for(backend, now.world)
        return probe(backend, timeout, device=now.device, env=how.environ(now.environ), enclosure=how.enclosure)

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = dict(zip(asked, pool.map(ask, asked), strict=True))
    checks = []
    for record, backend in named:
        spec, result = specs.get(backend), results.get(backend)
        judged = judge_probe(backend, spec, record, result) if result else _promise(backend, spec, now.device)
        checks.append(_isolated(now, backend, judged))
    return checks


def _isolated(now: Situation, backend: str, check: Check) -> Check:
    """Say so where the answer was given in the surroundings of the backend's own process."""
    if backend not in now.world.enclosed:
        return check
    return replace(check, message=f"isolated in its own process: {check.message}")


def _absent(spec: BackendSpec | None, known: Capabilities | None) -> bool:
    """Whether the vendor is missing beyond doubt: no package metadata, and no module to import either."""
    if spec is None or spec.available or known is None or known.vendor is None or spec.vendor_version is not None:
        return False
    module = (known.vendor.module or known.vendor.dist.replace("-", "_")).partition(".")[0]
    try:
        return find_spec(module) is None
    except (ImportError, ValueError):
        return False


def _promise(name: str, spec: BackendSpec | None, device: DeviceSpec) -> Check:
    if spec is None or spec.available:
        version = f"{spec.vendor} {spec.vendor_version}, " if spec and spec.vendor_version else ""
        return Check("backends", name, Status.OK, f"{version}available by its metadata (not probed)")
    unmissed = spec.platforms == {Platform.CPU} and device.platform is not Platform.CPU  # beside a GPU
    return Check.because("backends", name, Status.SKIP if unmissed else Status.WARN, spec.reasons[0])


def judge_probe(name: str, spec: BackendSpec | None, record: PluginRecord, result: ProbeResult) -> Check:
    """Compare what package metadata promises with what the probe found."""
    status, promised = result.status, spec is None or spec.available
    if status.available and not promised:
        return _mismatch(name, "available", "not available", record)
    codes = [item.code for item in status.reasons]
    if codes == [ReasonCode.PLATFORM_MISMATCH] and spec is not None and spec.platforms == {Platform.CPU}:
        return Check("backends", name, Status.OK, "for tensors on the CPU")  # beside a GPU that is no fault
    if not status.available:
        return _not_available(name, promised, record, result)
    strangers = [kernel for kernel in status.kernels if kernel not in record.kernels]
    if strangers:
        return _mismatch(name, f"the unregistered kernels {', '.join(strangers)}", "no such kernels", record)
    if spec is not None and spec.vendor_version and status.version and spec.vendor_version != status.version:
        return _mismatch(name, f"version {status.version}", f"version {spec.vendor_version}", record, Status.WARN)
    if result.health is not None and not result.health.ok:
        if "lz warmup" in result.health.detail:  # nothing is broken: it waits for its compiler
            return Check("backends", name, Status.WARN, result.health.detail, ReasonCode.JIT_NOT_READY, "lz warmup")
        why = reason("HEALTH_CHECK_FAILED", result.health.detail or "no detail given")
        return Check.because("backends", name, Status.FAIL, why, _reinstall(record))
    mine = [kernel for kernel in record.kernels if kernel.startswith(f"{name}.")]
    brings = f"{len(status.kernels)} of {len(mine)} kernels usable on this device" if mine else "brings no kernels"
    health = "no self test" if result.health is None else "self test passed"
    if result.health is not None and result.health.max_error is not None:
        health += f" (largest error {result.health.max_error:.1e})"
    words = [*filter(None, [status.version]), brings, health]
    if status.reasons:  # usable, but not wholly: an adapter that cannot be imported
        why = status.reasons[0]
        message = f"{', '.join(words)}; {why.message}"
        return Check("backends", name, Status.FAIL, message, why.code, status.fix or why.hint)
    return Check("backends", name, Status.OK, ", ".join(words))


def _not_available(name: str, promised: bool, record: PluginRecord, result: ProbeResult) -> Check:
    status = result.status
    why = status.reasons[0] if status.reasons else reason("BACKEND_IMPORT_FAILED", "no reason given")
    fix = status.fix or why.hint
    if why.code in (ReasonCode.BACKEND_PROBE_CRASHED, ReasonCode.BACKEND_PROBE_TIMEOUT):
        fix = f"{why.hint}, or set LAYERZERO_PLUGINS_DENY={record.name}"
    # Nothing depends on these.
    if not promised or why.code in (ReasonCode.BACKEND_STUB, ReasonCode.ACCEL_NOT_BUILT, ReasonCode.ACCEL_UNFIT):
        return Check.because("backends", name, Status.WARN, why, fix)
    if status.reasons and all(item.category is ReasonCategory.HARDWARE for item in status.reasons):
        return Check("backends", name, Status.WARN, f"not usable on this device: {why.message}", why.code, fix)
    # Calls would have believed the metadata: this is what must be known before deployment.
    return Check("backends", name, Status.FAIL, f"{why.message} (its package looks installed)", why.code, fix)


def _mismatch(name: str, found: str, promised: str, record: PluginRecord, status: str = Status.FAIL) -> Check:
    why = reason("AVAILABILITY_MISMATCH", found, promised)
    return Check.because("backends", name, status, why, _reinstall(record))


def _reinstall(record: PluginRecord) -> str:
    deny = f"set LAYERZERO_PLUGINS_DENY={record.name}"
    return f"pip install --force-reinstall {record.dist}, or {deny}" if record.dist else deny


# -- clashes -----------------------------------------------------------------------------------------------------
def clashes(now: Situation) -> list[Check]:
    """Kernels or backends that two plugins claim, and vendor packages that do not go together."""
    checks = [
        Check("conflicts", record.name, Status.FAIL, why.message, why.code, record.fix)
        for record in now.records
        for why in record.reasons
        if why.code in _CLASHES
    ]
    for dist, partner, parts in _PAIRS:
        ours, theirs = dist_version(dist), dist_version(partner)
        if ours and theirs and _release(ours, parts) != _release(theirs, parts):
            why = reason("BACKEND_CONFLICT", f"{partner} {theirs}", detail=f"{dist} is {ours}")
            fix = f"pip install '{dist}=={'.'.join(_release(theirs, parts))}.*', or pip uninstall {dist}"
            checks.append(Check.because("conflicts", dist, Status.FAIL, why, fix))
    checks += _quarrels(now)
    return checks or [Check("conflicts", "kernels", Status.OK, "every kernel id and backend has one owner")]


def _quarrels(now: Situation) -> Iterator[Check]:
    """Vendors that cannot share this process, with the exact fix; those that run in their own are only named."""
    for name, spec in sorted(now.world.registry.backends.items()):
        for why in spec.reasons:
            if why.code not in (ReasonCode.BACKEND_CONFLICT, ReasonCode.CUDA_VERSION_MISMATCH):
                continue
            if name in now.world.enclosed:
                message = f"{why.message}; it runs isolated, in its own process"
                yield Check("conflicts", name, Status.OK, message, why.code)
            else:
                yield Check.because("conflicts", name, Status.WARN, why)


def _release(version: str, parts: int) -> list[str]:
    return version.split("+")[0].split(".")[:parts]


# -- proofs: which kernels would be checked at their first call, and which were found wrong there
_GROUP = "proofs"


def first_use(now: Situation, only: str | None = None) -> list[Check]:
    """One check for each backend some kernel of which nothing vouches for here, or was found wrong."""
    if now.world.policy.on_first_use == "off":
        return [Check(_GROUP, "on_first_use", Status.OK, "off: kernels without proof are used unchecked")]
    by_backend: dict[str, list[KernelSpec]] = {}
    for kernel in now.world.registry.kernels.values():
        if only in (None, kernel.backend) and _usable(kernel, now):
            by_backend.setdefault(kernel.backend, []).append(kernel)
    checks = [check for backend, kernels in sorted(by_backend.items()) for check in _backend(now, backend, kernels)]
    if checks or only is not None:
        return checks
    return [Check(_GROUP, "kernels", Status.OK, "every kernel that can be used here is proven for it")]


def standing(kernel: KernelSpec, now: Situation) -> str | None:
    """By what a kernel is proven for some calls on a device of this machine; None where it is not."""
    fitting = (device for device in now.devices if not kernel.check_device(device))
    found = (proof_registry.standing(kernel, now.world, device) for device in fitting)
    return next((item for item in found if item is not None), None)


def _usable(kernel: KernelSpec, now: Situation) -> bool:
    backend = now.world.enclosed.get(kernel.backend) or now.world.registry.backends.get(kernel.backend)
    if (backend is not None and not backend.available) or verdict_on(kernel, now.world.policy).denied_by is not None:
        return False
    return now.fits(kernel)


def _backend(now: Situation, backend: str, kernels: Iterable[KernelSpec]) -> Iterator[Check]:
    blocked = now.world.health.quarantined
    fallbacks = {spec.fallback_id for spec in now.world.ops.values()}
    unproven = []
    for kernel in kernels:
        away = blocked.get(kernel.kernel_id, "")
        if ReasonCode.NUMERICS_MISMATCH.value in away.partition(":")[0]:
            message = f"{kernel.kernel_id} gave a wrong answer and is not used: {away}"
            fix = f"upgrade or uninstall its package; lz quarantine clear {kernel.kernel_id} tries it again"
            yield Check(_GROUP, backend, Status.FAIL, message, ReasonCode.NUMERICS_MISMATCH, fix)
        elif not away and kernel.kernel_id not in fallbacks and standing(kernel, now) is None:
            unproven.append(kernel.kernel_id)
    invalid = proof_registry.problems.get(backend)  # looking has read the file
    if invalid is not None:
        yield Check.because(_GROUP, backend, Status.WARN, invalid)
    if not unproven:
        return
    names = some_of(unproven, 6)
    spec = now.world.registry.backends.get(backend)
    if spec is not None and spec.builtin:
        yield Check(_GROUP, backend, Status.OK, f"checked at their first call: {names}")
    else:
        why = reason("FIRST_USE_UNCHECKED", names, detail="each is held against the baseline at its first call")
        yield Check.because(_GROUP, backend, Status.WARN, why)
