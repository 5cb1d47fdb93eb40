"""Which kernels may run for a context, and every reason why the others may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pkgutil import resolve_name
from typing import NamedTuple

from layerzero.device.signature import environment_signature
from layerzero.errors import from_outside
from layerzero.model.artifact import Artifact, artifact_of
from layerzero.model.context import Context
from layerzero.model.decision import Transform
from layerzero.model.kernel import KernelSpec
from layerzero.model.situation import kind_of
from layerzero.policy.rules import NEUTRAL, Judge, Verdict, matches_any
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.selection.memory import objection
from layerzero.selection.transforms import adaptations, apart, passage
from layerzero.selection.world import World, closed, unproven


class Filtered(NamedTuple):
    """A kernel's standing before scoring."""

    kernel: KernelSpec
    reasons: tuple[Reason, ...]
    transforms: tuple[Transform, ...]
    bonus: float
    preferred: int = 0


def is_empty(ctx: Context) -> bool:
    """Whether a call has nothing to compute: a zero-size batch or query, no keys. Its result is defined."""
    counts = _ATTENTION if ctx.op == "attention" else _COUNTS
    return any(value == 0 for name, value in ctx.dims if name in counts) or "dropout_all" in ctx.needs


_COUNTS = frozenset({"batch", "seq_len_q", "rows", "tokens"})
# Nothing attends nothing: no heads, keys or head_dim are as defined as no queries.
_ATTENTION = _COUNTS | {"num_heads", "num_kv_heads", "seq_len_k", "head_dim", "head_dim_v"}


def examine(ctx: Context, world: World, judged: Judge, locked: str | None, only: str | None = None) -> list[Filtered]:
    """Collect what speaks against each kernel of an op: policy, availability, health, declared limits, memory.

    `locked` is the kernel a lock names, None where the call's own `backend=` is stronger. An empty call is the
    fallback's alone, whatever is locked or asked for: no vendor kernel need know what to do with it. `only` examines
    one kernel.
    """
    policy, fallback_id = world.policy, world.ops[ctx.op].fallback_id
    empty = is_empty(ctx)
    careful = policy.strict_mode or not policy.allow_adaptation
    graphs = policy.graph_strict_mode and (ctx.capturing or "graph" in ctx.needs)
    bounded = world.free_memory is not None
    trials = bool(policy.setting("canary.kernels"))
    shut = world.proofs is not None and closed(ctx)
    found: list[Filtered] = []
    for kernel, fixed in _fixed(ctx, world):
        if only is not None and kernel.kernel_id != only:
            continue
        verdict = judged(kernel.kernel_id, kernel.backend)
        against: list[Reason] = []
        if empty and kernel.kernel_id != fallback_id:
            nothing = [f"{name}={size}" for name, size in ctx.dims if size == 0] or ["every weight is dropped"]
            against.append(reason("EMPTY_INPUT", ", ".join(nothing)))
        elif empty and verdict.denied_by is not None:
            against.append(reason("POLICY_DENIED", verdict.denied_by))
        elif not empty and (verdict is not NEUTRAL or not policy.enabled or ctx.backend is not None):
            against += _policy(kernel, ctx, world, verdict, fallback_id, locked)
        transforms: tuple[Transform, ...] = ()
        if fixed:
            against += fixed
        else:
            standing = kernel.check_call(ctx)
            if standing:
                standing, transforms = adaptations(kernel, ctx, standing)
                against += standing
            if kernel.predicate is not None and not standing:
                against += _ask(kernel.predicate, ctx)
            if careful and transforms:
                against.append(reason("ADAPTATION_NOT_ALLOWED", [step.name for step in transforms]))
            if world.enclosed and kernel.backend in world.enclosed:
                transforms = (*transforms, passage(ctx))
            if bounded:
                against += objection(kernel, ctx, transforms, world)
            if trials and kernel.kernel_id != fallback_id:
                against += _on_trial(kernel, ctx, world, locked)
            if shut and kernel.kernel_id != fallback_id and unproven(kernel, ctx, world):
                against.append(reason("FIRST_USE_UNCHECKED", kind_of(ctx)))
            if kernel.jit:
                against += _compiled(kernel, ctx, world)
            if graphs:
                listed = policy.graph_whitelist
                if not (matches_any(listed, kernel.kernel_id, kernel.backend) if listed else kernel.graph_safe):
                    against.append(reason("GRAPH_NOT_WHITELISTED"))
        found.append(Filtered(kernel, tuple(against), transforms, verdict.bonus, verdict.preferred))
    return found


def _fixed(ctx: Context, world: World) -> list[tuple[KernelSpec, list[Reason]]]:
    """Kernels of the op with the reasons that do not depend on the call: device, availability, health."""
    key = ("fixed", ctx.op, ctx.device)
    found: list[tuple[KernelSpec, list[Reason]]] | None = world.memo.get(key)
    if found is None:
        found = []
        for kernel in world.registry.by_op(ctx.op):
            backend = world.registry.backends.get(kernel.backend)
            device = ctx.device if backend is None else backend.sees(ctx.device)
            if kernel.backend in world.enclosed:
                kernel = apart(kernel)
            found.append((kernel, [*_available(kernel, world), *kernel.check_device(device)]))
        world.memo[key] = found
    return found


def _policy(
    kernel: KernelSpec, ctx: Context, world: World, verdict: Verdict, fallback_id: str, locked: str | None
) -> Iterator[Reason]:
    if verdict.denied_by is not None:
        yield reason("POLICY_DENIED", verdict.denied_by)
    # Of everything a policy says, only deny is stronger than the call's own wish.
    if not verdict.allowed and kernel.kernel_id != fallback_id and ctx.backend is None:
        yield reason("POLICY_NOT_ALLOWED", kernel.kernel_id, verdict.allow_list)
    if not world.policy.enabled and kernel.kernel_id != fallback_id:
        yield reason("POLICY_DISABLED")
    if ctx.backend is not None and ctx.backend not in (kernel.backend, kernel.kernel_id):
        yield reason("BACKEND_NOT_REQUESTED", kernel.backend, ctx.backend)
    if locked is not None and locked != kernel.kernel_id and world.policy.on_fault != "fallback":
        yield reason("POLICY_LOCKED_OUT", kernel.kernel_id, locked)


@lru_cache(maxsize=1024)
def _predicate(path: str) -> Callable[[Context], list[Reason]]:
    """A kernel's own check, a pure function of the context, named "module:name" in its descriptor."""
    found: Callable[[Context], list[Reason]] = resolve_name(path)
    return found


def _ask(path: str, ctx: Context) -> list[Reason]:
    """A kernel's own check; one that cannot be imported or raises costs only this kernel."""
    try:
        return list(_predicate(path)(ctx))
    except Exception as error:
        if from_outside(error):
            raise
        return [reason("VENDOR_REFUSED", f"{path}: {type(error).__name__}: {error}")]


def _available(kernel: KernelSpec, world: World) -> Iterator[Reason]:
    own = world.enclosed.get(kernel.backend)
    backend = own or world.registry.backends.get(kernel.backend)
    if backend is not None and not backend.available:
        yield from backend.reasons
    failed = world.unbindable.get(kernel.kernel_id)
    # An import that failed in one process says nothing about the other.
    if failed is not None and (failed.code is ReasonCode.ISOLATION_IMPORT_FAILED) is (own is not None):
        yield failed
    blocked = world.health.blocked_by(kernel.kernel_id, kernel.backend)
    if blocked is not None:
        yield blocked
    if world.ranks is not None and kernel.kernel_id in world.ranks.excluded:
        yield world.ranks.excluded[kernel.kernel_id]


def artifact_for(kernel: KernelSpec, ctx: Context, world: World) -> Artifact:
    """The compiled artifact this kernel needs for this call, here."""
    key = ("environment", ctx.device)
    environment: str | None = world.memo.get(key)
    if environment is None:
        environment = world.memo[key] = environment_signature(ctx.device)
    return artifact_of(kernel, ctx, environment)


def _compiled(kernel: KernelSpec, ctx: Context, world: World) -> list[Reason]:
    """No request compiles: a kernel without its artifact waits, unless the caller would rather wait for it."""
    artifact = artifact_for(kernel, ctx, world)
    if artifact in world.ready:
        return []
    failed = world.uncompilable.get(artifact) or world.uncompilable.get(kernel.kernel_id)
    if failed is not None and (failed.code != "JIT_NEEDS_DEVICE" or world.policy.jit != "block"):
        return [failed]
    if world.policy.jit == "block" or ctx.batch_invariant:  # meanwhile another kernel would give other bits
        return []
    if kernel.compiler == "device":
        return [reason("JIT_NEEDS_DEVICE", f"{kernel.backend} says so")]
    return [reason("JIT_NOT_READY", ", ".join(artifact[1][2:]) or None)]


def _on_trial(kernel: KernelSpec, ctx: Context, world: World, locked: str | None) -> list[Reason]:
    """A canary is not chosen before it was promoted, unless the call or a lock asks for it by name."""
    asked = ctx.backend in (kernel.kernel_id, kernel.backend) or locked == kernel.kernel_id
    outcome, wanted = world.trials.get(kernel.kernel_id), world.policy.setting("canary.kernels")
    if asked or outcome == "" or matches_any(wanted, kernel.kernel_id, kernel.backend) is None:
        return []
    if outcome:
        return [reason("CANARY_FAILED", outcome)]
    return [reason("CANARY_SHADOW", None, world.policy.setting("canary.calls"))]
