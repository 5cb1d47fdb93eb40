"""The decision for a call: from the table in force, from the cache, or selected now and told to whoever listens."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from layerzero.errors import from_outside
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.reasons import ReasonCategory
from layerzero.runtime.current import scope
from layerzero.runtime.state import state
from layerzero.selection.buckets import bucketed
from layerzero.selection.engine import select
from layerzero.selection.world import World
from layerzero.telemetry.events import details, observed

_log = logging.getLogger("layerzero.dispatch")
_select_log = logging.getLogger("layerzero.selection")
_UNCOMPILED = ("JIT_NOT_READY", "JIT_NEEDS_DEVICE")


def current_world() -> World:
    """The World of the active scope, else the current one."""
    active = scope.get()
    return state.world if active is None else active.world()


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
