"""Calls that torch wants to see: a mode, a tracer, a transform, forward-mode AD, a profiler. Never on the hot path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.dispatch import modes
from layerzero.dispatch.bind import bind
from layerzero.dispatch.decide import current_world, decide, describe
from layerzero.dispatch.hot import aside
from layerzero.errors import KernelExecutionError
from layerzero.model.context import Context
from layerzero.model.op import OperationSpec
from layerzero.runtime.current import opaque_ops
from layerzero.selection.engine import refuse
from layerzero.selection.world import World

# Backends whose kernels are torch's own operations: each transform of torch knows what to do with them, or says so.
_TORCHS_OWN = frozenset({"torch", "sdpa"})


def bypass(spec: OperationSpec, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """Subclasses, dispatch modes and tracers meet one opaque op; functorch and dual tensors the plain reference."""
    opaque = opaque_ops.get(spec.op_id)
    if modes.functorch_active() or opaque is None or modes.carries_tangent(modes.tensors_of(args)):
        world = current_world()
        return in_plain_torch(spec, describe(spec, args, layout, backend, world), world, args)
    return opaque(args, layout, backend)


def seen(
    spec: OperationSpec, args: tuple[Any, ...], layout: str | None, backend: str | None, again: Callable[[], Any]
) -> Any:
    """A call that torch wants to see (`hot.watched`): as an op where a mode or AD follows it, else by name.

    `again` makes the same call once more, and finds nobody watching: a profiler sees what would have run without it.
    """
    if not modes.plain(modes.tensors_of(args)):
        return bypass(spec, args, layout, backend)
    with aside.quietly():
        if not torch.autograd.profiler._is_profiler_enabled:
            return again()
        with torch._C._profiler._RecordFunctionFast(f"layerzero::{spec.op_id}"):
            return again()


def in_plain_torch(spec: OperationSpec, ctx: Context, world: World, args: tuple[Any, ...]) -> Any:
    """Run the reference, with whatever adaptation the call needs: torch can transform and derive each of its steps.

    Where policy or the caller leaves it out, the best kernel of torch's own; what that cannot do, torch says itself.
    """
    decision = decide(spec, ctx, world)
    kernels, ranking = world.registry.kernels, decision.ranking
    own = (name for name in ranking if name in kernels and kernels[name].backend in _TORCHS_OWN)
    found = spec.fallback_id if spec.fallback_id in ranking else next(own, None)
    if found is None:
        raise (
            refuse(decision)
            if not decision.chosen
            else KernelExecutionError(code="TRANSFORM_UNSUPPORTED", value=decision.chosen, limit=spec.fallback_id)
        )
    return bind(spec, decision, world, found).run(*args)
