"""Which backends run in a process of their own under a policy, and how that process finds them.

The answer is part of the World: selection reads it and asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from layerzero.model.config import Policy
from layerzero.model.kernel import BackendSpec
from layerzero.plugin.enclosure import Enclosure
from layerzero.plugin.vendor import CLASHES, presence_in
from layerzero.reasons import Reason, ReasonCode
from layerzero.runtime.proof_registry import BASELINES, proof_registry
from layerzero.selection.world import World


def with_enclosures(world: World) -> World:
    """The World with its isolated backends worked out; the same one where nothing changes."""
    if not world.policy.backend_isolation and not world.enclosed:
        return world
    kernels = {kernel.kernel_id: kernel.backend for kernel in world.registry.kernels.values()}
    found = enclosed(world.policy, world.registry.backends, kernels, world.unbindable)
    if found == world.enclosed:
        return world
    changed = world.changed(enclosed=found)
    if world.proofs is None:
        return changed
    return changed.changed(proofs=proof_registry.of_world(changed))  # a process of its own may have other versions


def enclosed(
    policy: Policy,
    backends: Mapping[str, BackendSpec],
    kernels: Mapping[str, str],
    unbindable: Mapping[str, Reason],
) -> Mapping[str, BackendSpec]:
    """Backend → how its own process finds it. Built-in backends stay: they are what everything falls back on."""
    found: dict[str, BackendSpec] = {}
    for name in sorted({*backends, *kernels.values()}):
        spec = backends.get(name) or BackendSpec(name)
        mode = policy.isolation_of(name)
        if mode == "in_process" or spec.builtin or name in BASELINES:
            continue
        entry = policy.isolation_entry(name)
        path = tuple(entry.get("path", ()))
        failed = {
            unbindable[kernel].code for kernel, owner in kernels.items() if owner == name and kernel in unbindable
        }
        if mode == "auto" and not _cannot_stay(spec, failed, bool(path)):
            continue
        found[name] = presence_in(spec, Enclosure(path, tuple(entry.get("hide", ()))))
    return MappingProxyType(found)


def _cannot_stay(spec: BackendSpec, failed: set[ReasonCode], elsewhere: bool) -> bool:
    """For mode auto: does the backend clash with this process, or live in folders that only its own one searches?"""
    codes = {item.code for item in spec.reasons} | failed
    if codes & {*CLASHES, ReasonCode.ISOLATION_IMPORT_FAILED}:
        return True
    return elsewhere and bool(codes & {ReasonCode.BACKEND_NOT_INSTALLED, ReasonCode.BACKEND_VERSION_MISMATCH})
