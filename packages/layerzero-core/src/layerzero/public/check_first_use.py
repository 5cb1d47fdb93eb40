"""Doctor's look at proofs: which kernels would be checked at their first call, and which were found wrong there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layerzero.model.kernel import KernelSpec
from layerzero.public.checks import Check, Status, some_of
from layerzero.public.situation import Situation, verdict_on
from layerzero.reasons import ReasonCode, reason
from layerzero.runtime.proof_registry import proof_registry

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
    return any(not kernel.check_device(device) for device in now.devices)


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
