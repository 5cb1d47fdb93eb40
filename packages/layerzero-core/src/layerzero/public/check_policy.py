"""Readiness: does everything that the policy needs exist and work, before the first request asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from layerzero.device.signature import environment_signature
from layerzero.dispatch.bind import resolve
from layerzero.errors import LayerZeroError, did_you_mean
from layerzero.kinds import is_kernel_id
from layerzero.model.config import Policy
from layerzero.model.enums import OpKind
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.manager import PluginState
from layerzero.plugin.probing import ProbeResult, probe
from layerzero.policy.layers import from_env, merge
from layerzero.policy.load import discover, from_mapping, load_file, mistakes
from layerzero.policy.rules import matches
from layerzero.public.check_machine import health, misspelt
from layerzero.public.checks import Check, ReadinessReport, Situation, Status, some_of, verdict_on
from layerzero.reasons import Reason, ReasonCategory, ReasonCode, reason
from layerzero.runtime.state import state
from layerzero.selection.world import World

if TYPE_CHECKING:
    from layerzero.jit.index import Entry


Config = str | os.PathLike[str] | Mapping[str, Any] | None


def readiness(now: Situation, config: Config, production: bool) -> ReadinessReport:
    """All checks, cheap ones first, and the numbers of the caches."""
    policy, told = _policy(now, config)
    world = now.world if policy is None else now.world.changed(policy=policy)
    checks = [*_schemas(now), *told]
    if policy is None:
        checks.append(Check("kernels", "required", Status.SKIP, "the policy is not valid, so nothing is known to be"))
    else:
        checks += [*_kernels(now, world, policy), *_hub(now, policy)]
    selection, hot = state.cache.stats().to_json(), len(now.world.hot)
    asked = selection["hits"] + selection["misses"]
    rate = f", {selection['hits'] / asked:.0%} hits of {asked}" if asked else ", not asked yet"
    filled = f"{selection['entries']} of {selection['max_entries']} entries{rate}; {hot} hot"
    checks += [Check("caches", "selection", Status.OK, filled), table(now, world)]
    if production:
        checks += _production(now, world, policy)
    caches = {"selection": selection, "hot_entries": hot, "counters": state.counters.to_json()}
    return ReadinessReport(tuple(checks), caches)


# -- schemas and policy ------------------------------------------------------------------------------------------
def _schemas(now: Situation) -> Iterator[Check]:
    broken = 0
    for record in now.records:
        if record.state != PluginState.FAILED:
            continue
        why = record.reasons[0]
        schema = why.category is ReasonCategory.SCHEMA or why.code is ReasonCode.CONFIG_FILE_MISSING
        broken += schema
        # A plugin that broke otherwise costs only itself, unless the policy needs it: then its kernel fails below.
        status = Status.FAIL if schema else Status.WARN
        yield Check("capabilities", record.name, status, why.message, why.code, record.fix)
    if not broken:
        registry = now.world.registry
        told = f"{len(registry.backends)} backends and {len(registry)} kernels, every descriptor valid"
        yield Check("capabilities", "schemas", Status.OK, told)


def _policy(now: Situation, config: Config) -> tuple[Policy | None, list[Check]]:
    wrong = [Check.error("policy", "variable", error) for error in now.wrong]
    try:
        if config is not None:
            layer = from_mapping(config, source="readiness_check") if isinstance(config, Mapping) else load_file(config)
            policy = merge((layer, from_env(now.env)))
        elif now.problem is not None:
            raise now.problem
        else:
            policy = now.world.policy
    except LayerZeroError as error:
        found = mistakes(config) if isinstance(config, (str, os.PathLike)) else ()
        return None, [*wrong, *(Check.error("policy", "policy", item) for item in found or (error,))]
    if wrong:
        return None, wrong
    where = f"{config}" if isinstance(config, (str, os.PathLike)) else "in force" if config is None else "given"
    valid = Check("policy", "policy", Status.OK, f"{where}, hash {policy.policy_hash[:12]}")
    return policy, [valid, *named_nothing(policy, now.world)]


def named_nothing(policy: Policy, world: World) -> list[Check]:
    """Patterns and conditions that match nothing here: legal, and usually a misspelling."""
    kernels = world.registry.kernels.values()
    checks: list[Check] = []
    for key, pattern in dict.fromkeys(_patterns(policy)):
        # An exact id in an allow list is a wish for that kernel, not a filter: it is among the required ones.
        asked = key == "allow" and is_kernel_id(pattern)
        if asked or any(matches(pattern, kernel.kernel_id, kernel.backend) for kernel in kernels):
            continue
        fix = similar(pattern, [*world.registry.kernels, *world.registry.backends])
        why = Check("policy", key, Status.WARN, f"{pattern} names no kernel here", ReasonCode.KERNEL_UNKNOWN, fix)
        checks.append(why)
    for op in dict.fromkeys([*dict(policy.locks), *(rule.match_op for rule in policy.rules)]):
        if not any(fnmatchcase(known, op) for known in world.ops):
            fix = similar(op, world.ops)
            checks.append(Check("policy", op, Status.WARN, "there is no such op here", ReasonCode.OP_UNKNOWN, fix))
    return checks


def _patterns(policy: Policy) -> Iterator[tuple[str, str]]:
    for rule in policy.program:
        for key in ("allow", "deny", "prefer", "avoid"):
            yield from ((key, pattern) for pattern in getattr(rule, key) or ())
        yield from (("boosts", pattern) for pattern, _ in rule.boosts)


def similar(name: str, known: Iterable[str]) -> str:
    """What to do about a name that nothing here bears."""
    return did_you_mean(name, known, "install the backend that brings it, or remove the entry", cutoff=0.5)


# -- kernels -----------------------------------------------------------------------------------------------------
def required(policy: Policy) -> dict[str, tuple[str, ...]]:
    """Kernels the policy cannot do without: kernel id → op patterns locked to it (empty: named in an allow list)."""
    wanted: dict[str, list[str]] = {}
    for op, kernel_id in policy.locks_by_op().items():
        wanted.setdefault(kernel_id, []).append(op)
    for rule in policy.rules:
        if rule.lock:
            wanted.setdefault(rule.lock, []).append(rule.match_op)
    for pattern in policy.allow:
        if is_kernel_id(pattern):
            wanted.setdefault(pattern, [])
    return {kernel_id: tuple(dict.fromkeys(ops)) for kernel_id, ops in wanted.items()}


def _kernels(now: Situation, world: World, policy: Policy) -> list[Check]:
    wanted = required(policy)
    probes: dict[str, ProbeResult] = {}
    checks = [_one_kernel(now, world, kernel_id, ops, probes) for kernel_id, ops in wanted.items()]
    if not checks:
        checks.append(Check("kernels", "required", Status.OK, "the policy locks and lists no kernel by name"))
    checks += _unserved(now, world)
    return [*checks, *_jit(now, world, wanted)]


def _one_kernel(
    now: Situation, world: World, kernel_id: str, ops: tuple[str, ...], probes: dict[str, ProbeResult]
) -> Check:
    kernel = world.registry.kernels.get(kernel_id)
    if kernel is None:
        why = reason("KERNEL_UNKNOWN", kernel_id, "")
        record = next((item for item in now.records if item.name == kernel_id.partition(".")[0]), None)
        if record is not None and record.state == PluginState.FAILED:
            cause = record.reasons[0]
            message = f"required by the policy, but its plugin did not load: {cause.message}"
            return Check("kernels", kernel_id, Status.FAIL, message, cause.code, record.fix)
        return Check.because("kernels", kernel_id, Status.FAIL, why, similar(kernel_id, world.registry.kernels))
    for why, fix in _against(now, world, kernel, ops, probes):
        message = f"required by the policy, but {why.message}"
        return Check("kernels", kernel_id, Status.FAIL, message, why.code, fix or why.hint)
    role = f"locked for {', '.join(ops)}" if ops else "in the allow list"
    return Check("kernels", kernel_id, Status.OK, f"{role}; registered, available, bound")


def _against(
    now: Situation, world: World, kernel: KernelSpec, ops: tuple[str, ...], probes: dict[str, ProbeResult]
) -> Iterator[tuple[Reason, str]]:
    """What speaks against a required kernel, in the order in which it is worth knowing."""
    for pattern in ops:
        others = [op for op in world.ops if fnmatchcase(op, pattern) and op != kernel.op]
        if others:
            why = reason("LOCKED_KERNEL_UNAVAILABLE", kernel.kernel_id, detail=f"it does not compute {others[0]}")
            yield why, f"lock {kernel.op} instead of {pattern}"
    verdict = verdict_on(kernel, world.policy)
    if verdict.denied_by is not None:
        yield reason("POLICY_DENIED", verdict.denied_by), ""
    backend = world.registry.backends.get(kernel.backend)
    if backend is not None and not backend.available:
        yield backend.reasons[0], ""
    blocked = world.health.blocked_by(kernel.kernel_id, kernel.backend)
    if blocked is not None:
        yield blocked, ""
    problems = [kernel.check_device(device) for device in now.devices]
    if all(problems):
        fit = ", ".join(sorted(kernel.platforms))
        yield problems[0][0], f"lock a kernel that fits this machine, or serve this policy where it does ({fit})"
    if kernel.kernel_id in world.unbindable:
        yield world.unbindable[kernel.kernel_id], ""
    if backend is not None and not backend.builtin:
        # The vendor is imported here only after it has survived being imported elsewhere.
        if kernel.backend not in probes:
            probes[kernel.backend] = probe(kernel.backend, now.env.probe_timeout, device=now.device, env=now.environ)
        told = _found_wrong(probes[kernel.backend])
        if told is not None:
            yield told
    try:
        resolve(kernel)
    except LayerZeroError as error:
        yield error.reasons[0], ""


def _found_wrong(result: ProbeResult) -> tuple[Reason, str] | None:
    """What a probe found wrong with a backend, and the fix; None where all is well."""
    if not result.status.available:
        told = result.status.reasons
        return told[0] if told else reason("BACKEND_IMPORT_FAILED", "no reason given"), result.status.fix
    if result.health is not None and not result.health.ok:
        return reason("HEALTH_CHECK_FAILED", result.health.detail), ""
    return None


def _hub(now: Situation, policy: Policy) -> Iterator[Check]:
    """One check when the policy has a `hub` section: is the package there, and everything as it was locked."""
    if not policy.hub:
        return
    record = next((record for record in now.records if record.name == "hub"), None)
    if record is None or record.state == PluginState.FAILED:
        why = reason("BACKEND_NOT_INSTALLED", "layerzero-hub") if record is None else record.reasons[0]
        yield Check.because("hub", "locked kernels", Status.FAIL, why, "pip install 'layerzero-hub[kernels]'")
        return
    result = probe("hub")
    status, health = result.status, result.health
    told = (status.reasons[0], status.fix) if status.reasons else _found_wrong(result)
    if told is None and health is not None:
        yield Check("hub", "locked kernels", Status.OK, health.detail)
    else:
        why, fix = told or (reason("HEALTH_CHECK_FAILED", "no answer"), "")
        fix = "lz hub verify" if why.code is ReasonCode.HEALTH_CHECK_FAILED else fix
        yield Check.because("hub", "locked kernels", Status.FAIL, why, fix)


def _unserved(now: Situation, world: World) -> list[Check]:
    """Ops for which this policy leaves no kernel at all on this machine."""
    checks, served = [], 0
    for op in sorted(world.ops):
        kernels = world.registry.by_op(op)
        if not kernels and world.ops[op].op_kind is OpKind.TOKENIZATION:
            continue  # all of its kernels come with a package of its own, which is not installed: nobody asked for it
        if not any(_may_serve(kernel, world, now) for kernel in kernels):
            fix = "install a backend for it, or relax deny, allow and fallback_enabled"
            checks.append(Check.because("kernels", op, Status.FAIL, reason("NO_KERNEL", op), fix))
        else:
            served += 1
    return checks or [Check("kernels", "ops", Status.OK, f"all {served} ops have a kernel on this machine")]


def _may_serve(kernel: KernelSpec, world: World, now: Situation) -> bool:
    fallback = world.ops[kernel.op].fallback_id == kernel.kernel_id
    verdict = verdict_on(kernel, world.policy)
    if verdict.denied_by is not None or (fallback and not world.policy.fallback_enabled):
        return False
    if not fallback and (not verdict.allowed or not world.policy.enabled):
        return False
    if kernel.jit and world.policy.jit != "block" and not any(name == kernel.kernel_id for name, _ in world.ready):
        return False  # no request compiles, so it serves nobody yet
    usable = world.registry.available(kernel.backend) and not world.health.blocks(kernel.kernel_id, kernel.backend)
    return usable and now.fits(kernel)


# -- compiled artifacts and caches -------------------------------------------------------------------------------
def _jit(now: Situation, world: World, wanted: Mapping[str, tuple[str, ...]]) -> list[Check]:
    """Kernels that are compiled at first use and that the policy needs: no request compiles, so it must be done."""
    from layerzero.jit.index import Index
    from layerzero.plugin.artifacts import cache_folder, distrust

    folder = cache_folder(now.env)
    found = (world.registry.kernels.get(kernel_id) for kernel_id in wanted)
    compiled = [kernel for kernel in found if kernel is not None and kernel.jit]
    if not compiled:
        return [Check("caches", "jit", Status.OK, "no required kernel is compiled at run time")]
    if (unsafe := distrust(folder)) is not None:
        fix = f"chown it to yourself and chmod 700 {folder}"
        return [Check.because("caches", "jit", Status.FAIL, unsafe, fix)]
    here = {environment_signature(device) for device in now.devices}
    entries = [entry for entry in Index(folder).entries() if entry.values[1] in here]
    return [_artifacts(kernel, entries) for kernel in compiled]


def _artifacts(kernel: KernelSpec, entries: list[Entry]) -> Check:
    """Whether a kernel has compiled artifacts in these very versions."""
    name, mine = f"jit {kernel.kernel_id}", [entry for entry in entries if entry.kernel_id == kernel.kernel_id]
    mine = [entry for entry in mine if entry.values[0] == kernel.version]
    ready, failed = [entry for entry in mine if not entry.error], [entry for entry in mine if entry.error]
    if ready:
        return Check("caches", name, Status.OK, f"{len(ready)} compiled artifact{'s' if len(ready) > 1 else ''}")
    if failed:
        return Check.because("caches", name, Status.FAIL, reason("JIT_FAILED", failed[-1].error), "")
    fix = f"run lz.warmup for {kernel.op} on this machine, or ship the cache in LAYERZERO_JIT_CACHE_DIR"
    return Check.because("caches", name, Status.FAIL, reason("JIT_NOT_READY", kernel.kernel_id), fix)


def table(now: Situation, world: World, group: str = "caches") -> Check:
    """Whether the dispatch table that is named can be read, and holds for a device of this machine and the policy."""
    name, problem = "dispatch table", state.table_problem
    if problem is not None:
        why = problem.reasons[0]
        message = f"{state.table_path} is not in force: {why.message}"
        return Check(group, name, Status.FAIL, message, why.code, problem.hint)
    held = world.table
    if held is None and (named := now.env.dispatch_table or world.policy.dispatch_table):
        cause = "the policy above is not valid" if now.problem is not None else "this process has put it aside"
        fix = "correct the policy" if now.problem is not None else f"lz.use_table({named!r}), or name none"
        return Check(group, name, Status.WARN, f"{named} is not in force: {cause}", None, fix)
    if held is None:
        return Check(group, name, Status.SKIP, "none is configured")
    from layerzero.selection.engine import objections

    wrong = [objections(held, world, device) for device in now.devices]
    if all(wrong):
        why = min(wrong, key=len)[0]
        message = f"{state.table_path or held.content_hash[:12]} is not in force: {why.message}"
        return Check(group, name, Status.FAIL, message, why.code, why.hint)
    told = f"{len(held.entries)} plans for {held.hardware.device}, hash {held.content_hash[:12]}"
    return Check(group, name, Status.OK, told)


# -- production --------------------------------------------------------------------------------------------------
# A server that starts is expected to stay as it was tested, so most of what is a warning elsewhere fails here.
# Nothing compiles while requests wait, nothing is measured beside them, no setting is misspelt, no kernel is known to
# have taken a process down.
_GROUP = "production"


def _production(now: Situation, world: World, policy: Policy | None) -> list[Check]:
    """Every check; one that has nothing to say is a line that says so."""
    if policy is None:
        return [Check(_GROUP, "production", Status.SKIP, "the policy is not valid")]
    # An entry of a kernel that this policy denies, or that another version has replaced, stands in nobody's way.
    unwell = (check for check in health(now, policy=policy) if check.status in (Status.WARN, Status.FAIL))
    found = [replace(check, group=_GROUP, status=Status.FAIL) for check in unwell]
    found += [*_settings(now), *_compiling(now, world, policy), *_measuring(policy)]
    if not any(check.status in (Status.FAIL, Status.WARN) for check in found):
        found.append(Check(_GROUP, "production", Status.OK, "nothing compiles, measures or fails beside requests"))
    return found


def _settings(now: Situation) -> Iterator[Check]:
    yield from misspelt(_GROUP, now, Status.FAIL)
    if now.env.debug:
        fix = "unset LAYERZERO_DEBUG"
        yield Check(_GROUP, "variable", Status.WARN, "LAYERZERO_DEBUG checks plans at each call", None, fix)
    # A policy that merely lies in the working directory is another one when the service starts elsewhere.
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
