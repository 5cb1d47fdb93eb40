"""What happens when a kernel raises: whose fault it was, which candidate runs instead, whose breaker is charged.

And what stands around a kernel that may fail badly: first runs, devices that are gone, memory that is not there.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, GuardFailed, bind
from layerzero.dispatch.decide import current_world, decide, describe
from layerzero.dispatch.traced_calls import bypass
from layerzero.errors import (
    BackendNotAvailableError,
    CudaGraphUnsafeError,
    DeviceLostError,
    KernelExecutionError,
    LayerZeroError,
    from_outside,
    one_line,
)
from layerzero.health.sticky import NO_MEMORY, sticky
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.reasons import Reason, reason
from layerzero.runtime.crashes import child_crashed, first_run, put
from layerzero.runtime.pressure import pressure
from layerzero.runtime.state import state
from layerzero.selection.memory import device_label, device_name, estimate, free_on, leaner
from layerzero.selection.world import World, unchecked
from layerzero.telemetry.events import details, observed

_log = logging.getLogger("layerzero.dispatch")

_RAN_LIMIT = 4_096
_OOM_TRIES = 3
_OOM_CHARGE = 3
_OOM_WINDOW_S = 60.0

_settled: set[tuple[str, str]] = set()
_oom_seen: dict[str, list[float]] = {}


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
    excuse(bound, args, error)
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
            excuse(failed, args, next_error)
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
            {"dtype": decision.context.dtype, "device": device_name(decision.context), **dict(decision.context.dims)},
            exc_info=untold(kernel_id, error),
            extra=details(event="failover", op=spec.op_id, kernel_id=kernel_id, ran=ran, reasons=[item.code.value]),
        )
        kernel = world.registry.kernels.get(kernel_id)
        owner = kernel_id.partition(".")[0] if kernel is None else kernel.backend
        if out_of_memory(error):
            charge_memory(kernel_id, owner, decision.context)
            continue
        if kernel is not None and item.code == "ISOLATION_CRASHED" and "signal" in str(item.value):
            child_crashed(kernel, decision.context.device, item)
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


# -- around a run ---------------------------------------------------------------------------------------------------
@contextmanager
def running(bound: Bound, world: World, ctx: Context) -> Iterator[None]:
    """Around the run of a cold call: a crash marker in case the process ends in it; the GPU is waited for once.

    Errors of a GPU come late. Waiting after the first run of each kernel on a device makes the first thing that goes
    wrong the fault of the kernel that did it. Never inside a capture, where waiting is an error.
    """
    device = ctx.device
    apart = bound.kernel.backend in world.enclosed  # its crash is not ours
    markers, slot = (None, None) if apart or ctx.capturing else first_run(bound.kernel, device)
    try:
        yield
        if slot is not None and device.device_type == "cuda":
            key = (bound.kernel_id, device_label(device.device_type, device.index))
            if key not in _settled:
                torch.cuda.current_stream(device.index).synchronize()
                _settled.add(key)
    finally:
        if markers is not None:
            markers.leave(slot)


def check_device(tensors: list[Tensor]) -> None:
    """Refuse a call on a device that is gone, before anything is tried there."""
    for item in tensors:
        why = state.lost.get(device_label(item.device.type, item.device.index))
        if why is not None:
            raise DeviceLostError(why.message, reasons=(why,))


def excuse(bound: Bound, args: tuple[Any, ...], error: Exception) -> None:
    """Raise where a kernel that raised is not to be replaced: a handler or a hook raised, or the device is gone.

    No later call on such a device can succeed. The kernel goes into the quarantine, but only for the first such error
    of a device: after it every kernel fails there.
    """
    if from_outside(error):
        raise error
    there = next((item.device for item in modes.tensors_of(args) if not item.is_cpu), None)
    if there is None or bound.kernel.backend in state.world.enclosed:
        return
    label = device_label(there.type, there.index)
    why = sticky(error, label)
    if why is None:
        return
    if label not in state.lost:
        state.lost[label] = why
        put(bound.kernel, bound.decision.context.device, why)
    raise DeviceLostError(f"{bound.kernel_id}: {why.message}", reasons=(why,)) from error


def untold(kernel_id: str, error: Exception) -> Exception | None:
    """An error whose traceback is to be logged; None for a retry that ends like the failure before it."""
    before = state.health.snapshot().state(kernel_id).last_error
    return None if before == f"{type(error).__name__}: {error}" else error


# -- memory ---------------------------------------------------------------------------------------------------------
def out_of_memory(error: BaseException) -> bool:
    """Python's, a device's, or the CPU allocator's, which raises a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in NO_MEMORY)


def to_try_after(decision: Decision, failed: str, world: World, error: Exception) -> tuple[str, ...]:
    """The candidates after one failed. Out of memory: those that take less, a few of them, with the caches emptied."""
    if not out_of_memory(error):
        return tuple(kernel_id for kernel_id in decision.ranking if kernel_id != failed)
    # Let go of what the failed kernel had taken: its frames hold tensors, torch's allocator holds blocks.
    traceback.clear_frames(error.__traceback__)
    if decision.context.device.device_type == "cuda" and not modes.capturing("cuda"):
        torch.cuda.empty_cache()
    return leaner(failed, decision.steps, decision.context, world)[:_OOM_TRIES]


def charge_memory(kernel_id: str, backend: str, ctx: Context) -> None:
    """Pressure is not the kernel's fault; but one that keeps running into it is set aside for a cooldown."""
    now = time.monotonic()
    seen = [when for when in _oom_seen.get(kernel_id, ()) if now - when < _OOM_WINDOW_S] + [now]
    _oom_seen[kernel_id] = seen
    pressure.felt(device_name(ctx))
    if len(seen) >= _OOM_CHARGE:
        del _oom_seen[kernel_id]
        state.health.kernel_failed(kernel_id, str(reason("OUT_OF_MEMORY", f"{len(seen)} times in a row")), backend)


def none_leaner(
    spec: OperationSpec, decision: Decision, failures: list[tuple[str, Exception]], world: World
) -> KernelExecutionError:
    """One clear error: who ran out of memory, what each would take, and what is free."""
    ctx = decision.context
    lines = []
    for kernel_id, how in decision.steps:
        kernel = world.registry.kernels.get(kernel_id)
        if kernel is not None:
            found = estimate(kernel, ctx, how)
            takes = f"{found.total} bytes" if found.declared or found.temporaries else "nothing declared"
            tried = next((str(error).split("\n")[0] for name, error in failures if name == kernel_id), "takes no less")
            lines.append(f"\n  {kernel_id}: {takes} besides inputs and result; {tried[:160]}")
    free = free_on(ctx, world)
    have = "" if free is None else f", about {free} bytes are free on {device_name(ctx)}"
    first = failures[0]
    why = reason("OUT_OF_MEMORY", f"{first[0]}: {str(first[1]).split(chr(10))[0][:200]}")
    message = f"{spec.op_id} ran out of memory and no other kernel takes less{have}{''.join(lines)}"
    return KernelExecutionError(message, reasons=(why,))


def _forget() -> None:
    _settled.clear()
    _oom_seen.clear()


state.on_reset(_forget)
