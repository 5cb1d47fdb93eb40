"""Which kernels may run for a context, and every reason why the others may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from layerzero.model.context import Context
from layerzero.model.decision import Transform
from layerzero.model.kernel import KernelSpec
from layerzero.policy.rules import Judge, matches_any
from layerzero.reasons import Reason, reason
from layerzero.selection.transforms import adaptations
from layerzero.selection.world import World

__all__ = ["Filtered", "examine"]


@dataclass(frozen=True, slots=True)
class Filtered:
    """A kernel's standing before scoring."""

    kernel: KernelSpec
    reasons: tuple[Reason, ...]
    transforms: tuple[Transform, ...]
    bonus: float


def examine(kernel: KernelSpec, ctx: Context, world: World, judged: Judge, fallback_id: str) -> Filtered:
    """Collect what speaks against a kernel: policy, availability, health, declared limits, memory."""
    policy = world.policy
    verdict = judged(kernel.kernel_id, kernel.backend)
    found: list[Reason] = []
    if verdict.denied_by is not None:
        found.append(reason("POLICY_DENIED", verdict.denied_by))
    if not verdict.allowed and kernel.kernel_id != fallback_id:
        found.append(reason("POLICY_NOT_ALLOWED", kernel.kernel_id, verdict.allow_list))
    if not policy.enabled and kernel.kernel_id != fallback_id:
        found.append(reason("POLICY_DISABLED"))
    if ctx.backend is not None and ctx.backend not in (kernel.backend, kernel.kernel_id):
        found.append(reason("BACKEND_NOT_REQUESTED", kernel.backend, ctx.backend))
    if verdict.locked_to is not None and verdict.locked_to != kernel.kernel_id:
        if not (policy.on_fault == "fallback"):
            found.append(reason("POLICY_LOCKED_OUT", kernel.kernel_id, verdict.locked_to))
    found.extend(_available(kernel, world))
    standing, transforms = adaptations(kernel, ctx, kernel.check(ctx))
    found.extend(standing)
    if kernel.predicate is not None and not standing:
        found.extend(_predicate(kernel.predicate)(ctx))
    if transforms and (policy.strict_mode or not policy.allow_adaptation):
        found.append(reason("ADAPTATION_NOT_ALLOWED", [step.name for step in transforms]))
    found.extend(_memory(kernel, ctx, world))
    if (
        (ctx.capturing or "graph" in ctx.needs)
        and policy.graph_strict_mode
        and not _whitelisted(kernel, policy.graph_whitelist)
    ):
        found.append(reason("GRAPH_NOT_WHITELISTED"))
    return Filtered(kernel, tuple(found), transforms, verdict.bonus)


@lru_cache(maxsize=1024)
def _predicate(path: str) -> Callable[[Context], list[Reason]]:
    """A kernel's own check, a pure function of the context, named "module:name" in its descriptor."""
    module, _, name = path.partition(":")
    found: Callable[[Context], list[Reason]] = getattr(import_module(module), name)
    return found


def _available(kernel: KernelSpec, world: World) -> list[Reason]:
    found: list[Reason] = []
    backend = world.registry.backends.get(kernel.backend)
    if backend is not None and not backend.available:
        found.extend(backend.reasons)
    if kernel.kernel_id in world.unbindable:
        found.append(world.unbindable[kernel.kernel_id])
    blocked = world.health.blocked_by(kernel.kernel_id, kernel.backend)
    if blocked is not None:
        found.append(blocked)
    return found


def _memory(kernel: KernelSpec, ctx: Context, world: World) -> list[Reason]:
    """Workspace against headroom: free memory minus what the policy keeps free."""
    if kernel.workspace is None or world.free_memory is None:
        return []
    keep = int((world.policy.memory_headroom_mb or 0) * 2**20)
    room = max(0, world.free_memory - keep)
    needed = kernel.workspace_bytes(ctx)
    return [reason("MEMORY_HEADROOM_EXCEEDED", needed, room)] if needed > room else []


def _whitelisted(kernel: KernelSpec, whitelist: tuple[str, ...]) -> bool:
    if not whitelist:
        return kernel.graph_safe
    return matches_any(whitelist, kernel.kernel_id, kernel.backend) is not None
