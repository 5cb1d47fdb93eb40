"""What happens around a kernel that may fail badly: first runs, devices that are gone, memory that is not there.

Nothing here is on the path of a hot call that succeeds.
"""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound
from layerzero.errors import DeviceLostError, KernelExecutionError
from layerzero.health.sticky import NO_MEMORY, sticky
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.reasons import Reason, reason
from layerzero.runtime.crashes import child_crashed, first_run, put
from layerzero.runtime.pressure import pressure
from layerzero.runtime.state import state
from layerzero.selection.memory import device_label, device_name, estimate, free_on, leaner
from layerzero.selection.world import World

_OOM_TRIES = 3
_OOM_CHARGE = 3
_OOM_WINDOW_S = 60.0

_settled: set[tuple[str, str]] = set()
_oom_seen: dict[str, list[float]] = {}


class Running:
    """Around the run of a cold call: a crash marker in case the process ends in it; the GPU is waited for once.

    Errors of a GPU come late. Waiting after the first run of each kernel on a device makes the first thing that goes
    wrong the fault of the kernel that did it. Never inside a capture, where waiting is an error.
    """

    __slots__ = ("_bound", "_device", "_markers", "_slot")

    def __init__(self, bound: Bound, world: World, ctx: Context) -> None:
        self._bound, self._device = bound, ctx.device
        apart = bound.kernel.backend in world.enclosed  # its crash is not ours
        self._markers, self._slot = (None, None) if apart or ctx.capturing else first_run(bound.kernel, ctx.device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        try:
            if kind is None and self._slot is not None and self._device.device_type == "cuda":
                key = (self._bound.kernel_id, device_label(self._device.device_type, self._device.index))
                if key not in _settled:
                    torch.cuda.current_stream(self._device.index).synchronize()
                    _settled.add(key)
        finally:
            if self._markers is not None:
                self._markers.leave(self._slot)


def check_device(tensors: list[Tensor]) -> None:
    """Refuse a call on a device that is gone, before anything is tried there."""
    if not state.lost:
        return
    for item in tensors:
        why = state.lost.get(device_label(item.device.type, item.device.index))
        if why is not None:
            raise DeviceLostError(why.message, reasons=(why,))


def lost_device(bound: Bound, tensors: list[Tensor], error: Exception) -> DeviceLostError | None:
    """The error to raise when no later call on the device can succeed; writes the kernel into the quarantine.

    Only the first such error of a device names a suspect: after it every kernel fails there.
    """
    there = next((item.device for item in tensors if not item.is_cpu), None)
    if there is None or bound.kernel.backend in state.world.enclosed:
        return None
    label = device_label(there.type, there.index)
    why = sticky(error, label)
    if why is None:
        return None
    if label not in state.lost:
        state.lost[label] = why
        put(state, bound.kernel, bound.decision.context.device, why)
    return DeviceLostError(f"{bound.kernel_id}: {why.message}", reasons=(why,))


def untold(kernel_id: str, error: Exception) -> Exception | None:
    """An error whose traceback is to be logged; None for a retry that ends like the failure before it."""
    before = state.health.snapshot().state(kernel_id).last_error
    return None if before == f"{type(error).__name__}: {error}" else error


def crashed_child(kernel_id: str, decision: Decision, why: Reason, world: World) -> None:
    """Count crashes of isolated processes by the kernel that ran in them."""
    kernel = world.registry.kernels.get(kernel_id)
    if kernel is not None and why.code == "ISOLATION_CRASHED" and "signal" in str(why.value):
        child_crashed(state, kernel, decision.context.device, why)


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
    _release(error, decision.context)
    return leaner(failed, decision.steps, decision.context, world)[:_OOM_TRIES]


def _release(error: Exception, ctx: Context) -> None:
    """Let go of what the failed kernel had taken: its frames hold tensors, torch's allocator holds blocks."""
    traceback.clear_frames(error.__traceback__)
    if ctx.device.device_type == "cuda" and not modes.capturing("cuda"):
        torch.cuda.empty_cache()


def charge_memory(kernel_id: str, backend: str, ctx: Context) -> None:
    """Pressure is not the kernel's fault; but one that keeps running into it is set aside for a cooldown."""
    now = time.monotonic()
    seen = [when for when in _oom_seen.get(kernel_id, ()) if now - when < _OOM_WINDOW_S] + [now]
    _oom_seen[kernel_id] = seen
    pressure.felt(state, device_name(ctx))
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
    pressure.forget()


state.on_reset(_forget)
