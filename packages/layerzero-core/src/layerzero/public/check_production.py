"""Readiness of a production process: what is merely worth a warning elsewhere fails here, before the first request.

A server that starts is expected to stay as it was tested: nothing compiles while requests wait, nothing is measured
beside them, no setting is misspelt, no kernel is known to have taken a process down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layerzero.device.signature import environment_signature
from layerzero.model.config import Policy
from layerzero.policy.load import discover
from layerzero.public.check_machine import health, misspelt
from layerzero.public.checks import Check, Status, some_of
from layerzero.public.situation import Situation, verdict_on
from layerzero.reasons import ReasonCode
from layerzero.runtime.state import state
from layerzero.selection.world import World

_GROUP = "production"


def production(now: Situation, world: World, policy: Policy | None) -> list[Check]:
    """Every check; one that has nothing to say is a line that says so."""
    if policy is None:
        return [Check(_GROUP, "production", Status.SKIP, "the policy is not valid")]
    found = [*_health(now, policy), *_variables(now), *_untrusted(now)]
    found += [*_compiling(now, world, policy), *_measuring(policy)]
    if not any(check.status in (Status.FAIL, Status.WARN) for check in found):
        found.append(Check(_GROUP, "production", Status.OK, "nothing compiles, measures or fails beside requests"))
    return found


def _health(now: Situation, policy: Policy) -> Iterator[Check]:
    """Open breakers, quarantined kernels, adapters that cannot be imported: a process that starts must have none.

    An entry of a kernel that this policy denies, or that another version has replaced, stands in nobody's way.
    """
    for check in health(now, policy=policy):
        if check.status in (Status.WARN, Status.FAIL):
            yield replace(check, group=_GROUP, status=Status.FAIL)


def _variables(now: Situation) -> Iterator[Check]:
    yield from misspelt(_GROUP, now, Status.FAIL)
    if now.env.debug:
        fix = "unset LAYERZERO_DEBUG"
        yield Check(_GROUP, "variable", Status.WARN, "LAYERZERO_DEBUG checks plans at each call", None, fix)


def _untrusted(now: Situation) -> Iterator[Check]:
    """A policy that merely lies in the working directory is another one when the service starts elsewhere."""
    for found in discover(now.env):
        if not found.trusted:
            fix = f"name it: LAYERZERO_CONFIG={found.path}"
            message = f"{found.path.name} was found in the working directory"
            yield Check(_GROUP, "policy file", Status.WARN, message, ReasonCode.PATH_NOT_TRUSTED, fix)


def _compiling(now: Situation, world: World, policy: Policy) -> Iterator[Check]:
    """No request waits for a compiler, and what would be compiled beside requests is compiled before."""
    if policy.jit == "block":
        fix = "jit: background or off, and lz warmup before the first request"
        message = "jit is block: a request that meets a new size waits for the compiler"
        yield Check(_GROUP, "jit", Status.FAIL, message, ReasonCode.JIT_NOT_READY, fix)
    here = {environment_signature(device) for device in now.devices}
    ready = {artifact[0] for artifact in world.ready if artifact[1][1] in here}
    missing = []
    for kernel in world.registry.kernels.values():
        if not kernel.jit or kernel.kernel_id in ready or not world.registry.available(kernel.backend):
            continue
        verdict = verdict_on(kernel, policy)
        # A kernel that nobody prefers and that was made for comparison has a negative priority.
        if now.fits(kernel) and verdict.allowed and verdict.denied_by is None and kernel.priority + verdict.bonus > 0:
            missing.append(kernel.kernel_id)
    if missing and policy.jit != "off":
        message = f"{len(missing)} kernels that may be chosen have no compiled artifact: {some_of(missing, 5)}"
        fix = "lz warmup MODEL on this machine, ship the cache in LAYERZERO_JIT_CACHE_DIR, or set jit: off"
        yield Check(_GROUP, "jit cache", Status.FAIL, message, ReasonCode.JIT_NOT_READY, fix)
    for artifact, failed in world.uncompilable.items():
        name = artifact if isinstance(artifact, str) else artifact[0]
        yield Check.because(_GROUP, f"jit {name}", Status.FAIL, failed, "lz warmup --retry, or deny the kernel")


def _measuring(policy: Policy) -> Iterator[Check]:
    if policy.setting("perfdb.auto_tune"):
        fix = "perfdb: {auto_tune: false}; tune before, with lz tune"
        yield Check(_GROUP, "perfdb", Status.WARN, "kernels are measured beside requests (auto_tune)", None, fix)
    if state.tally is not None:
        yield Check(_GROUP, "recording", Status.WARN, "calls are recorded", None, "unset LAYERZERO_RECORD")
