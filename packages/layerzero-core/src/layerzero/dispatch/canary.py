"""Canaries: a new kernel runs beside the one in charge on a share of the calls, and is promoted when they agree.

The caller always gets the result of the kernel in charge. The canary runs on the same inputs, without gradients, and
must agree within the op's tolerance; where they differ, the reference says who is wrong. One wrong answer or one
exception ends the trial. A promotion holds for this process: take the kernel out of `canary.kernels` to make it last.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.failover import excuse
from layerzero.errors import from_outside
from layerzero.forking import fresh_lock
from layerzero.model.context import Context
from layerzero.model.decision import Decision
from layerzero.model.op import OperationSpec
from layerzero.numerics.compare import compare
from layerzero.numerics.tolerances import tolerance
from layerzero.reasons import reason
from layerzero.runtime.state import state
from layerzero.selection.engine import select
from layerzero.selection.world import World

_log = logging.getLogger("layerzero.health")

_lock = fresh_lock()
_good: dict[tuple[str, str], int] = {}


def trials() -> dict[str, int]:
    """Good comparisons so far, by canary."""
    found: dict[str, int] = {}
    for (kernel_id, _), count in list(_good.items()):
        found[kernel_id] = found.get(kernel_id, 0) + count
    return found


def shadowed(run: Callable[..., Any], spec: OperationSpec, decision: Decision, world: World) -> Callable[..., Any]:
    """The kernel in charge, with a canary beside it now and then. The first canary of the decision, one at a time."""
    kernel_id = decision.shadow[0]
    wanted = world.policy.setting("canary.calls")
    every = max(1, round(1.0 / world.policy.setting("canary.fraction")))
    turn = itertools.count(1)
    canary: list[Bound] = []

    def tried(args: tuple[Any, ...], out: Any) -> str | None:
        """What is wrong with the canary's answer to this call; None when nothing is."""
        given = tuple(item.detach() if type(item) in (Tensor, torch.nn.Parameter) else item for item in args)
        try:
            with torch.no_grad():
                if not canary:
                    # As it would be bound after its promotion: with the very transforms it would then have.
                    promoted = world.changed(trials=MappingProxyType({**world.trials, kernel_id: ""}))
                    canary.append(bind(spec, select(decision.context, promoted), promoted, kernel_id))
                mine = canary[0].run(*given)
                differs = _differs(mine, out, decision.context)
                if differs is None:
                    return None
                truth = bind(spec, decision, world, spec.fallback_id).run(*given)
                return _differs(mine, truth, decision.context)
        except Exception as error:
            if canary:
                excuse(canary[0], args, error)  # a device that is gone is so for the kernel in charge as well
            elif from_outside(error):
                raise
            return str(reason("KERNEL_RAISED", f"{type(error).__name__}: {error}"[:300]))

    def beside(*args: Any) -> Any:
        out = run(*args)
        if next(turn) % every or (spec.mutates is not None and spec.mutates(args)):
            return out
        tensors = modes.tensors_of(args)
        if (tensors and modes.capturing(tensors[0].device.type)) or kernel_id in state.world.trials:
            return out
        _count(kernel_id, world, tried(args, out), wanted)
        return out

    return beside


def _differs(mine: Any, truth: Any, ctx: Context) -> str | None:
    from layerzero.tuning.truth import flat  # start-up time

    ours, theirs = flat(mine), flat(truth)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, expected {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not a.is_floating_point():
            if a.shape != b.shape or not torch.equal(a, b):
                return str(reason("NUMERICS_MISMATCH", "values or shapes that are not equal", "no difference"))
            continue
        found = compare(a, b.detach(), tolerance(ctx.op, a.dtype))
        if not found.ok:
            return str(reason("NUMERICS_MISMATCH", found.seen, found.allowed))
    return None


def _count(kernel_id: str, world: World, wrong: str | None, wanted: int) -> None:
    """One comparison more; at the end of the trial its outcome becomes part of the World."""
    key = (kernel_id, world.policy.policy_hash)
    with _lock:
        if wrong is None:
            _good[key] = _good.get(key, 0) + 1
            if _good[key] < wanted:
                return
        if _good.pop(key, 0) == 0 and wrong is None:
            return  # another thread has just ended the trial
    with state.changing():
        if kernel_id in state.world.trials:
            return
        state.publish(trials=MappingProxyType({**state.world.trials, kernel_id: wrong or ""}))
    if wrong is None:
        _log.warning("canary %s is promoted after %d good comparisons", kernel_id, wanted)
    else:
        _log.error("canary %s has failed its trial: %s", kernel_id, wrong)


state.on_reset(_good.clear)
