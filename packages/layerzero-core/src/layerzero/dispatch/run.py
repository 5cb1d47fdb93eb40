"""The cold path: describe, decide, bind, run; `failover` takes over when a kernel raises. Hot calls go elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, GuardFailed, bind
from layerzero.dispatch.decide import current_world, decide, describe
from layerzero.dispatch.failover import check_device, fail_over, remember, running, set_aside
from layerzero.dispatch.hot import HOT_LIMIT
from layerzero.dispatch.traced_calls import bypass
from layerzero.errors import BackendNotAvailableError, KernelExecutionError
from layerzero.model.context import Context
from layerzero.model.op import OperationSpec
from layerzero.model.situation import kind_of
from layerzero.reasons import reason
from layerzero.recording.tally import Tally
from layerzero.runtime.pressure import pressure
from layerzero.runtime.state import state
from layerzero.runtime.timers import on_miss
from layerzero.selection.engine import refuse
from layerzero.selection.memory import device_name
from layerzero.selection.world import World, unchecked
from layerzero.telemetry.events import observed

__all__ = ["bypass", "current_world", "decide", "describe", "miss", "ready", "recover"]


@observed("dispatch", lambda args, out: {"op": args[0].op_id})
def miss(
    spec: OperationSpec,
    world: World,
    key: Any,
    args: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    bucketed: Any = None,
) -> Any:
    """Run a call whose key is not hot, and make it hot; under `bucketed` too, the key with a size by its bucket."""
    tensors = modes.tensors_of(args)
    if not modes.plain(tensors):
        return bypass(spec, args, layout, backend)
    state.counters.misses += 1
    if state.lost:
        check_device(tensors)
    if state.health.next_deadline() is not None and on_miss():
        world, bucketed = current_world(), None  # its buckets are those of the World before
    ctx = describe(spec, args, layout, backend, world)
    if pressure.met(world, device_name(ctx)):
        world, bucketed = current_world(), None
    rng = spec.random is not None and spec.random(args)
    bound = _bound(spec, ctx, world, rng, args)
    checked: set[str] = set()
    while unchecked(spec, bound.kernel, ctx, world) and bound.kernel_id not in checked:
        from layerzero.dispatch.first_use import BaselineFailed, check

        checked.add(bound.kernel_id)
        try:
            served = check(spec, ctx, world, bound, args)
        except BaselineFailed as failed:
            return recover(spec, world, failed.bound, args, layout, backend, failed.error)
        if served is not None:
            if isinstance(world.tally, Tally):  # a rehearsal and a report wait for the call that is the kernel's own
                world.tally.met({}, (None, None), ctx, bound, args)
            remember(bound, served.kernel_id)
            return served.result
        world, bucketed = current_world(), None
        bound = _bound(spec, ctx, world, rng, args)
    _insert(world, key, bucketed, bound, tensors)
    if world.tally is not None:
        world.tally.met(world.hot, (key, bucketed), ctx, bound, args)
    remember(bound, bound.kernel_id)
    try:
        with running(bound, world, ctx):
            return bound.run(*args)
    except Exception as error:
        return recover(spec, world, bound, args, layout, backend, error)


def ready(spec: OperationSpec, ctx: Context, world: World, args: tuple[Any, ...]) -> Bound:
    """Select and bind for a call that will be made many times (`lz.plan`): a kernel that is proven."""
    rng = spec.random is not None and spec.random(args)
    bound = _bound(spec, ctx, world, rng, args)
    while unchecked(spec, bound.kernel, ctx, world):
        from layerzero.dispatch.first_use import ahead

        ahead(spec, ctx, world, bound)
        world, before = current_world(), bound.kernel_id
        bound = _bound(spec, ctx, world, rng, args)
        if bound.kernel_id == before and unchecked(spec, bound.kernel, ctx, world):
            return _proven(spec, ctx, world, bound)
    return bound


def _proven(spec: OperationSpec, ctx: Context, world: World, bound: Bound) -> Bound:
    """The best candidate of a decision that is proven, where the chosen one could not be checked."""
    for kernel_id in bound.decision.ranking:
        if not unchecked(spec, world.registry.kernels[kernel_id], ctx, world):
            return bind(spec, bound.decision, world, kernel_id, rng=bound.rng)
    raise KernelExecutionError(
        f"{bound.kernel_id} has no proof for such a call and cannot be checked before it is made",
        reasons=(reason("FIRST_USE_UNCHECKED", kind_of(ctx)),),
    )


def _bound(spec: OperationSpec, ctx: Context, world: World, rng: bool, args: tuple[Any, ...]) -> Bound:
    """Select and bind; a kernel whose adapter cannot be imported is set aside and the selection repeated."""
    while True:  # ends: each round sets a kernel aside, and without any left the decision is a refusal
        decision = decide(spec, ctx, world)
        if decision.pending:
            from layerzero.dispatch.beside import compile_beside

            compile_beside(spec, ctx, decision, world, args)
        if not decision.chosen:
            raise refuse(decision)
        try:
            return bind(spec, decision, world, rng=rng)
        except BackendNotAvailableError as error:
            set_aside(decision.chosen, error)
            world = current_world()


def _insert(world: World, key: Any, bucketed: Any, bound: Bound, tensors: list[Tensor]) -> None:
    """Make a choice hot in the World it was made for; one made while switches were off is left to the cache.

    Such choices (the user's sdpa_kernel context, a capture, an odd pointer) share their key with the normal
    one, whose guard sends them here; the selection cache answers them.
    """
    ctx = bound.decision.context
    if key is None or ctx.switched_off or ctx.capturing or not ctx.aligned_pointers:
        return
    if bound.decision.fingerprint != world.fingerprint:
        return  # the World was swapped meanwhile; its successor will learn this itself
    if not all(modes.keyable_device(item.device) for item in tensors):
        return
    if len(world.hot) >= HOT_LIMIT:
        world.hot.clear()
    world.hot[key] = bound
    if bucketed is not None:
        world.hot[bucketed] = bound


def recover(
    spec: OperationSpec,
    world: World,
    bound: Bound,
    args: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    error: Exception,
) -> Any:
    """A bound kernel raised: select again where only its guard did not hold, else fail over to another candidate."""
    if isinstance(error, GuardFailed):
        return miss(spec, world, None, args, layout, backend)
    return fail_over(spec, world, bound, args, layout, backend, error)
