"""The cold path: describe, select, bind, run; and what happens when a kernel raises.

Hot calls do not come here. `miss` handles a key that is not in the hot table, `recover` a bound kernel
that raised, `decide` answers `lz.select` and `lz.explain` with the very decision dispatch would use.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, GuardFailed, bind
from layerzero.dispatch.describing import describe
from layerzero.dispatch.faults import (
    Running,
    charge_memory,
    check_device,
    crashed_child,
    lost_device,
    none_leaner,
    out_of_memory,
    to_try_after,
)
from layerzero.dispatch.hot import HOT_LIMIT
from layerzero.errors import (
    BackendNotAvailableError,
    CudaGraphUnsafeError,
    KernelExecutionError,
    LayerZeroError,
    from_outside,
)
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.model.proof import kind_of
from layerzero.reasons import Reason, ReasonCategory, reason
from layerzero.runtime.current import opaque_ops, scope
from layerzero.runtime.pressure import pressure
from layerzero.runtime.probation import on_miss
from layerzero.runtime.state import state
from layerzero.selection.buckets import bucketed
from layerzero.selection.engine import refuse, select
from layerzero.selection.memory import device_name
from layerzero.selection.proven import unchecked
from layerzero.selection.world import World
from layerzero.telemetry.events import details, observed

__all__ = ["bypass", "current_world", "decide", "describe", "miss", "ready", "recover"]

_log = logging.getLogger("layerzero.dispatch")
_select_log = logging.getLogger("layerzero.selection")

_RAN_LIMIT = 4_096


def current_world() -> World:
    """The World of the active scope, else the current one."""
    active = scope.get()
    return state.world if active is None else active.world()


# -- deciding ------------------------------------------------------------------------------------
def decide(spec: OperationSpec, ctx: Context, world: World) -> Decision:
    """The decision for a context in a World, from the selection cache when it was made before."""
    canonical, _ = bucketed(world, ctx, spec.growing)
    key = (canonical, world.fingerprint)

    def compute() -> Decision:
        if world.table is None:
            return _selected(ctx, world)
        from layerzero.selection.following import follow

        followed = follow(spec, ctx, world)
        if isinstance(followed, Decision):
            state.counters.followed += 1
            return followed
        decision = _selected(ctx, world)
        # A call that the table in force does not cover says so.
        return decision if followed is None else replace(decision, notes=(*decision.notes, followed))

    if world.ranks is not None:
        return state.cache.get_or_compute(key, lambda: world.ranks.settle(compute()))
    return state.cache.get_or_compute(key, compute)


def _choice(args: tuple[Any, ...], decision: Decision | None) -> dict[str, Any]:
    """What telemetry says of a selection."""
    found: dict[str, Any] = {"op": args[0].op, "dtype": args[0].dtype, **dict(args[0].dims)}
    if decision is not None:
        found |= {"kernel": decision.chosen, "transform_cost_us": decision.transform_cost_total}
    return found


@observed("select", _choice)
def _selected(ctx: Context, world: World) -> Decision:
    state.counters.selections += 1
    decision = select(ctx, world)
    _announce(decision)
    return decision


def _announce(decision: Decision) -> None:
    """Log a new decision once; observers of `layerzero_decided` hear of it."""
    others = decision.candidates[1:] if decision.is_fallback else ()
    # Where the user's own policy kept the others out, the reference is what was asked for.
    unasked = [c for c in others if not any(r.category is ReasonCategory.POLICY for r in c.reasons)]
    # Nor is a kernel missed that nobody had compiled and that would not have been preferred.
    unasked = [c for c in unasked if c.reasons[0].code != "JIT_NOT_READY" or c.kernel_id in decision.pending]
    if unasked and not decision.locked:
        why = "; ".join(f"{c.kernel_id}: {c.reasons[0]}" for c in unasked[:5])
        _select_log.warning(
            "%s: no kernel fits, the reference runs (%s)", decision.op, why, extra=details(**_told(decision))
        )
    elif _select_log.isEnabledFor(logging.INFO):
        _select_log.info(
            "%s -> %s (transform_cost_total=%.1f us)",
            decision.op,
            decision.chosen or "nothing",
            decision.transform_cost_total,
            extra=details(**_told(decision)),
        )
    manager = state.plugin_manager
    if manager is not None:
        for impl in manager.hook.layerzero_decided.get_hookimpls():
            try:
                impl.function(decision)
            except Exception as error:
                if from_outside(error):
                    raise
                _log.exception("observer %s raised", impl.plugin_name)


def _told(decision: Decision) -> dict[str, Any]:
    """A decision for a structured log."""
    return {
        "event": "selection",
        "op": decision.op,
        "kernel_id": decision.chosen,
        "dtype": decision.context.dtype,
        "dims": dict(decision.context.dims),
        "fallback": decision.is_fallback,
        "transform_cost_total": decision.transform_cost_total,
        "reasons": {c.kernel_id: [item.code.value for item in c.reasons] for c in decision.candidates if c.reasons},
    }


# -- running -------------------------------------------------------------------------------------
@observed("dispatch", lambda args, out: {"op": args[0].op_id})
def miss(
    spec: OperationSpec,
    world: World,
    key: Any,
    args: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    near: Any = None,
) -> Any:
    """Run a call whose key is not hot, and make it hot. `near` is an optional bucketed key."""
    tensors = modes.tensors_of(args)
    if not modes.plain(tensors):
        return bypass(spec, args, layout, backend)
    state.counters.misses += 1
    if state.lost:
        check_device(tensors)
    if state.health.next_deadline() is not None and on_miss(state):
        world, near = current_world(), None  # the near key holds buckets of the World before
    ctx = describe(spec, args, layout, backend, world)
    if pressure.met(state, world, device_name(ctx)):
        world, near = current_world(), None
    rng = spec.random is not None and spec.random(args)
    bound = _bound(spec, ctx, world, rng, args)
    checked: set[str] = set()
    while unchecked(spec, bound.kernel, ctx, world) and bound.kernel_id not in checked:
        from layerzero.dispatch.first_use import BaselineFailed, check

        checked.add(bound.kernel_id)
        try:
            served = check(spec, ctx, world, bound, args)
        except BaselineFailed as failed:
            return recover(spec, world, None, failed.bound, args, layout, backend, failed.error)
        if served is not None:
            _remember(bound, served.kernel_id)
            return served.result
        world, near = current_world(), None
        bound = _bound(spec, ctx, world, rng, args)
    _insert(world, key, near, bound, tensors)
    if world.tally is not None:
        world.tally.met(world.hot, (key, near), ctx, bound, args)
    _remember(bound, bound.kernel_id)
    try:
        with Running(bound, world, ctx):
            return bound.run(*args)
    except Exception as error:
        return recover(spec, world, key, bound, args, layout, backend, error)


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
            from layerzero.dispatch.compiling import compile_beside

            compile_beside(spec, ctx, decision, world, args)
        if not decision.chosen:
            raise refuse(decision)
        try:
            return bind(spec, decision, world, rng=rng)
        except BackendNotAvailableError as error:
            _set_aside(decision.chosen, error)
            world = current_world()


def _set_aside(kernel_id: str, error: BackendNotAvailableError) -> None:
    _log.warning("%s cannot be bound: %s", kernel_id, error)
    state.unbindable(kernel_id, error.reasons[0])


def _insert(world: World, key: Any, near: Any, bound: Bound, tensors: list[Tensor]) -> None:
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
    if near is not None:
        world.hot[near] = bound


def _remember(bound: Bound, kernel_id: str) -> None:
    if len(state.ran) >= _RAN_LIMIT:
        state.ran.clear()
    state.ran[bound.decision.context, bound.decision.policy_hash] = kernel_id
    if state.counting is not None:
        state.counting.cold(bound.decision.op, kernel_id)


def bypass(spec: OperationSpec, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """Subclasses, dispatch modes and tracers meet one opaque op; functorch and dual tensors the plain reference."""
    opaque = opaque_ops.get(spec.op_id)
    if modes.functorch_active() or opaque is None or modes.carries_tangent(modes.tensors_of(args)):
        from layerzero.dispatch.seen import in_plain_torch

        world = current_world()
        return in_plain_torch(spec, describe(spec, args, layout, backend, world), world, args)
    return opaque(args, layout, backend)


def recover(
    spec: OperationSpec,
    world: World,
    key: Any,
    bound: Bound,
    args: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    error: Exception,
) -> Any:
    """A bound kernel raised. Decide whose fault it was; if the kernel's, run the next candidate.

    User errors, transforms, captures, interrupts and what handlers and hooks raise never open a breaker; a breaker
    is charged only after another candidate has shown that the same inputs can be computed.
    """
    if isinstance(error, GuardFailed):
        return miss(spec, world, None, args, layout, backend)
    if from_outside(error):
        raise error
    tensors = modes.tensors_of(args)
    if not modes.plain(tensors):
        return bypass(spec, args, layout, backend)
    if isinstance(error, LayerZeroError):
        raise error
    lost = lost_device(bound, tensors, error)
    if lost is not None:
        raise lost from error
    if tensors and modes.capturing(tensors[0].device.type):
        raise CudaGraphUnsafeError(
            f"{bound.kernel_id} raised during capture: {error}", code="GRAPH_CAPTURE_FAILED", value=str(error)
        ) from error
    try:
        ctx = describe(spec, args, layout, backend, current_world())
    except LayerZeroError as refused:
        raise refused from error  # a value that is not part of any key is wrong: the caller's error, not the kernel's
    if bound.decision.locked and world.policy.on_fault != "fallback":
        own = getattr(error, "reason", None)
        raise KernelExecutionError(
            f"{spec.op_id} is locked to {bound.kernel_id}, which raised",
            value=_short(error),
            reasons=(own,) if isinstance(own, Reason) else (),
        ) from error
    if spec.mutates is not None and spec.mutates(args):
        if bound.kernel_id != spec.fallback_id:  # the last resort stays in reach
            state.health.kernel_failed(bound.kernel_id, error, bound.kernel.backend)
        raise KernelExecutionError(
            f"{bound.kernel_id} raised while writing in place; the inputs may be half written, so nothing was retried",
            value=_short(error),
        ) from error
    return _next_candidate(spec, ctx, bound, args, error)


@observed("failover", lambda args, out: {"op": args[0].op_id, "kernel": args[2].kernel_id, "cause": _short(args[4])})
def _next_candidate(spec: OperationSpec, ctx: Context, failed: Bound, args: tuple[Any, ...], error: Exception) -> Any:
    """Run the candidates of the present decision, best first: a plan's own may be long out of date."""
    world = current_world()
    # A table names one kernel a call, which has just raised: the others are for selection to rank.
    decision = decide(spec, ctx, world if world.table is None else world.changed(table=None))
    failures: list[tuple[str, Exception]] = [(failed.kernel_id, error)]
    kernels = world.registry.kernels
    for kernel_id in to_try_after(decision, failed.kernel_id, world, error):
        if kernel_id in kernels and unchecked(spec, kernels[kernel_id], ctx, world):
            continue  # a call that has failed once is no place to try what nobody has checked
        try:
            bound = bind(spec, decision, world, kernel_id, rng=failed.rng)
            out = bound.run(*args)
        except BackendNotAvailableError as missing:
            _set_aside(kernel_id, missing)
            continue
        except GuardFailed:
            continue  # it does not fit after all, which is nobody's fault
        except Exception as next_error:
            if from_outside(next_error):
                raise
            lost = lost_device(failed, modes.tensors_of(args), next_error)
            if lost is not None:
                raise lost from next_error
            failures.append((kernel_id, next_error))
            continue
        _charge(spec, decision, failures, kernel_id, world)
        _remember(bound, kernel_id)
        return out
    if all(out_of_memory(item) for _, item in failures):
        raise none_leaner(spec, decision, failures, world) from error
    reasons = tuple(_reason_for(kernel_id, item) for kernel_id, item in failures)
    lines = "".join(f"\n  {kernel_id}: {_short(item)}" for kernel_id, item in failures)
    raise KernelExecutionError(f"{spec.op_id}: every candidate raised{lines}", reasons=reasons) from error


def _charge(
    spec: OperationSpec, decision: Decision, failures: list[tuple[str, Exception]], ran: str, world: World
) -> None:
    state.counters.failovers += 1
    for kernel_id, error in failures:
        item = _reason_for(kernel_id, error)
        _log.error(
            "%s: %s raised, %s ran instead. %s; context %s",
            spec.op_id,
            kernel_id,
            ran,
            item,
            dict(decision.context.dims),
            exc_info=error,
            extra=details(event="failover", op=spec.op_id, kernel_id=kernel_id, ran=ran, reasons=[item.code.value]),
        )
        kernel = world.registry.kernels.get(kernel_id)
        owner = kernel_id.partition(".")[0] if kernel is None else kernel.backend
        if out_of_memory(error):
            charge_memory(kernel_id, owner, decision.context)
            continue
        crashed_child(kernel_id, decision, item, world)
        state.health.kernel_failed(kernel_id, error, owner)


def _reason_for(kernel_id: str, error: Exception) -> Reason:
    own = getattr(error, "reason", None)
    if isinstance(own, Reason):  # a fault of an isolated kernel knows what it is
        return own
    if out_of_memory(error):
        return reason("OUT_OF_MEMORY", _short(error))
    return reason("KERNEL_RAISED", f"{kernel_id}: {_short(error)}")


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 300 else text[:297] + "..."
