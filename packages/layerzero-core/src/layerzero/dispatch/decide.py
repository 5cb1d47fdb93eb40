"""What a call is, the op's own Context plus torch's modes at this moment; and the decision for it.

A decision comes from the table in force, from the cache, or is made now and told to whoever listens.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from layerzero.dispatch import modes
from layerzero.errors import (
    BackendNotAvailableError,
    ConfigurationError,
    InvalidInputError,
    UnknownNameError,
    did_you_mean,
    from_outside,
    invalid,
)
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import OpKind
from layerzero.model.op import Call, OperationSpec
from layerzero.reasons import ReasonCategory
from layerzero.runtime.current import scope
from layerzero.runtime.state import state
from layerzero.selection.engine import follow, select
from layerzero.selection.filter import is_empty
from layerzero.selection.world import World, bucketed
from layerzero.telemetry.events import details, observed

_log = logging.getLogger("layerzero.dispatch")
_select_log = logging.getLogger("layerzero.selection")
_UNCOMPILED = ("JIT_NOT_READY", "JIT_NEEDS_DEVICE")


def current_world() -> World:
    """The World of the active scope, else the current one."""
    active = scope.get()
    return state.world if active is None else active.world()


def describe(
    spec: OperationSpec,
    call_args: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    world: World,
    device: DeviceSpec | None = None,
) -> Context:
    """The full Context of a call: the op's own part plus torch's modes at this moment.

    `device` describes the call as if its tensors (meta ones will do) lay on that device, which need not be here.
    """
    if backend is not None:
        _check_backend(backend, world)
    tensors = modes.tensors_of(call_args)
    for item in tensors:
        if item.is_nested:
            raise InvalidInputError(code="RAGGED_UNSUPPORTED", value="nested tensor")
        if item.layout is not torch.strided:
            shown = str(item.layout).removeprefix("torch.")
            raise InvalidInputError(code="TYPE_INVALID", value=f"a {shown} tensor", limit="a dense tensor")
    if device is None:
        device = modes.device_spec(tensors[0].device if tensors else torch.device("cpu"))
    needs_grad = torch.is_grad_enabled() and any(item.requires_grad for item in tensors)
    assert spec.describe is not None
    ctx = spec.describe(Call(call_args, device, layout, backend, needs_grad))
    said = ctx.op if isinstance(ctx, Context) else type(ctx).__name__
    if said != spec.op_id:  # its kernels would be those of another op
        text, limit = f"op {spec.op_id!r}: `describe` gives a context of {said!r}", f"one of {spec.op_id!r}"
        raise ConfigurationError(text, value=said, limit=limit)
    return _with_modes(spec, ctx, tensors, world)


def _check_backend(backend: str, world: World) -> None:
    """Refuse a `backend=` that names nothing, and one whose plugin failed, with the plugin's own reasons."""
    if not isinstance(backend, str):
        raise invalid("TYPE_INVALID", f"backend: {type(backend).__name__}", "a backend name or kernel id")
    known = world.registry
    if backend in known.kernels or backend in known.backends or known.by_backend(backend):
        return
    for record in state.records:
        if backend in (record.name, *record.backends) and record.reasons:
            raise BackendNotAvailableError(f"backend {backend!r} could not be loaded", reasons=record.reasons)
    names = sorted({kernel.backend for kernel in known.kernels.values()})
    hint = did_you_mean(backend, {*names, *known.kernels}, f"use one of: {', '.join(names)}")
    raise UnknownNameError(
        f"unknown backend {backend!r}", code="BACKEND_UNKNOWN", value=backend, limit=names, hint=hint
    )


def _with_modes(spec: OperationSpec, ctx: Context, tensors: list[Tensor], world: World) -> Context:
    """Fold autocast, determinism, capture, switches and alignment into a context."""
    changes: dict[str, Any] = {}
    autocast = modes.autocast_dtype(ctx.device.device_type)
    if autocast is not None:
        changes["autocast"] = autocast
        if spec.autocast and ctx.dtype != "float64":
            changes["dtype"] = autocast
            # As in torch, autocast leaves float64 alone.
            changes["dtypes"] = tuple(word if word == "float64" else autocast for word in ctx.dtypes)
    if torch.are_deterministic_algorithms_enabled() or world.policy.deterministic:
        changes["deterministic"] = True
    if world.policy.batch_invariant and ctx.kind is not OpKind.TOKENIZATION and not is_empty(ctx):
        changes["batch_invariant"] = True
    if modes.capturing(ctx.device.device_type):
        changes["capturing"] = True
    guarded, alignment = _asked(world, spec.op_id)
    if guarded:
        off = modes.switched_off() & guarded
        if off:
            changes["switched_off"] = off
    if alignment > 1 and not _aligned(tensors, alignment):
        changes["aligned_pointers"] = False
    ctx = replace(ctx, **changes) if changes else ctx
    strict = world.policy.strict_mode or not world.policy.allow_adaptation
    if strict and spec.op_id == "attention" and len(set(ctx.dtypes)) > 1:
        # As torch refuses it; elsewhere one of them is cast, which is an adaptation.
        raise InvalidInputError(code="DTYPE_MIXED", value=", ".join(ctx.dtypes))
    return ctx if world.ranks is None else world.ranks.requires(ctx)


def _asked(world: World, op: str) -> tuple[frozenset[str], int]:
    """What the kernels of an op look at: their switches, and the strictest alignment of pointers (1 byte: none)."""
    key = ("asked", op)
    found: tuple[frozenset[str], int] | None = world.memo.get(key)
    if found is None:
        kernels = world.registry.by_op(op)
        guards = frozenset(guard for kernel in kernels for guard in kernel.guards)
        found = world.memo[key] = guards, math.lcm(*(kernel.pointer_alignment or 1 for kernel in kernels))
    return found


def _aligned(tensors: list[Tensor], bytes_: int) -> bool:
    try:
        return all(_address(item) % bytes_ == 0 for item in tensors)
    except RuntimeError:  # a tensor without storage, inside a transform: nothing to ask
        return True


def _address(item: Tensor) -> int:
    """Of one that is only described: its storage begins aligned, and what has an unknown offset there may be."""
    if type(item) is Tensor or not isinstance(item, FakeTensor):
        return item.data_ptr()
    offset = item.storage_offset()
    return offset * item.element_size() if isinstance(offset, int) else 0


def decide(spec: OperationSpec, ctx: Context, world: World) -> Decision:
    """The decision for a context in a World, from the selection cache when it was made before."""
    canonical, _ = bucketed(world, ctx, spec.growing)
    key = (canonical, world.fingerprint)

    def compute() -> Decision:
        if world.table is None:
            return _selected(ctx, world)
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
    unasked = [c for c in unasked if c.reasons[0].code not in _UNCOMPILED or c.kernel_id in decision.pending]
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
