"""What happens when a kernel raises: whose fault it was, which candidate runs instead, whose breaker is charged."""

from __future__ import annotations

import logging
from typing import Any

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, GuardFailed, bind
from layerzero.dispatch.decide import current_world, decide
from layerzero.dispatch.describe import describe
from layerzero.dispatch.faults import (
    charge_memory,
    crashed_child,
    lost_device,
    none_leaner,
    out_of_memory,
    to_try_after,
    untold,
)
from layerzero.dispatch.traced_calls import bypass
from layerzero.errors import (
    BackendNotAvailableError,
    CudaGraphUnsafeError,
    KernelExecutionError,
    LayerZeroError,
    from_outside,
    one_line,
)
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.reasons import Reason, reason
from layerzero.runtime.state import state
from layerzero.selection.proven import unchecked
from layerzero.selection.world import World
from layerzero.telemetry.events import details, observed

_log = logging.getLogger("layerzero.dispatch")

_RAN_LIMIT = 4_096


def fail_over(
    spec: OperationSpec,
    world: World,
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
            value=one_line(error),
            reasons=(own,) if isinstance(own, Reason) else (),
        ) from error
    if spec.mutates is not None and spec.mutates(args):
        if bound.kernel_id != spec.fallback_id:  # the last resort stays in reach
            state.health.kernel_failed(bound.kernel_id, error, bound.kernel.backend)
        raise KernelExecutionError(
            f"{bound.kernel_id} raised while writing in place; the inputs may be half written, so nothing was retried",
            value=one_line(error),
        ) from error
    return _next_candidate(spec, ctx, bound, modes.as_on_device(args), error)


@observed("failover", lambda args, out: {"op": args[0].op_id, "kernel": args[2].kernel_id, "cause": one_line(args[4])})
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
            set_aside(kernel_id, missing)
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
        remember(bound, kernel_id)
        return out
    if all(out_of_memory(item) for _, item in failures):
        raise none_leaner(spec, decision, failures, world) from error
    reasons = tuple(_reason_for(kernel_id, item) for kernel_id, item in failures)
    lines = "".join(f"\n  {kernel_id}: {one_line(item)}" for kernel_id, item in failures)
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
            exc_info=untold(kernel_id, error),
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
        return reason("OUT_OF_MEMORY", one_line(error))
    return reason("KERNEL_RAISED", f"{kernel_id}: {one_line(error)}")


def set_aside(kernel_id: str, error: BackendNotAvailableError) -> None:
    """Leave a kernel out of every later decision: its adapter or vendor cannot be imported."""
    _log.warning("%s cannot be bound: %s", kernel_id, error)
    state.unbindable(kernel_id, error.reasons[0])


def remember(bound: Bound, kernel_id: str) -> None:
    """Note which kernel ran for a decision, for `lz.which` and the counters."""
    if len(state.ran) >= _RAN_LIMIT:
        state.ran.clear()
    state.ran[bound.decision.context, bound.decision.policy_hash] = kernel_id
    if state.counting is not None:
        state.counting.cold(bound.decision.op, kernel_id)
