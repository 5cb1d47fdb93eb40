"""`lz.plan_block`: several ops planned together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layerzero.dispatch.run import current_world
from layerzero.errors import InvalidInputError
from layerzero.plans.blocks import Block
from layerzero.plans.blocks_cost import Meter
from layerzero.plans.blocks_plan import BlockPlan, BlockReport, signature
from layerzero.plans.blocks_search import Path, per_op, search
from layerzero.selection.world import World
from layerzero.tuning.race import race

__all__ = ["plan_block"]

# A plan has to win a direct comparison clearly (three quarters of its samples faster than three quarters of the
# others') and by this much; else it is not worth its packed weights.
_MARGIN = 0.98


def plan_block(block: Block, tensors: Mapping[str, Any], *, measure: bool = False, check: bool = False) -> BlockPlan:
    """Plan a block of ops jointly and bind it to its weights; the plan is called with the block's inputs.

        from layerzero.plans.blocks import decoder_layer
        plan = lz.plan_block(decoder_layer(heads=32, kv_heads=8), {"x": x, "cos": cos, "sin": sin, "ln1": ln1, ...})
        out = plan(x, cos, sin)
        print(plan.explain())

    The path through the block is the cheapest over kernels, fused ops, packed projections and layouts, the transforms
    between them counted. Times come from the performance database where it has them; else they are estimated, or with
    `measure=True` taken here, every kernel checked against the reference first, and the plan itself is raced against
    choosing for each op alone and dropped where it does not win. Plans are cached by block and tensors until anything
    changes that selection depends on. `check=True` verifies the inputs of each call.
    """
    if not isinstance(block, Block):
        raise InvalidInputError(code="TYPE_INVALID", value=type(block).__name__, limit="a layerzero.plans.blocks.Block")
    block.check(tensors)
    world = current_world()
    key = signature(block, tensors, measure)
    known: dict[Any, BlockReport] = world.memo.setdefault("blocks", {})
    report = known.get(key)
    if report is None:
        report = _planned(block, tensors, world, measure)
        if current_world().fingerprint == world.fingerprint:  # a kernel that could not be bound has made a new World
            known[key] = report
    return BlockPlan(block, tensors, report, check=check)


def _planned(block: Block, tensors: Mapping[str, Any], world: World, measure: bool) -> BlockReport:
    meter = Meter(world, measure=measure)
    alone = per_op(block, tensors, world, meter)
    best = search(block, tensors, world, meter)
    if not measure:
        return BlockReport(block, best, alone, measured=False)
    return _raced(block, tensors, best, alone)


def _raced(block: Block, tensors: Mapping[str, Any], best: Path, alone: Path) -> BlockReport:
    """The plan against op by op, in turns, on the real tensors: sums of single times are no proof."""
    inputs = [tensors.get(name) for name in block.inputs]
    first = BlockPlan(block, tensors, BlockReport(block, best, alone, measured=True))
    second = BlockPlan(block, tensors, BlockReport(block, alone, alone, measured=True))
    device = next(item.device for item in tensors.values() if isinstance(item, torch.Tensor))
    with torch.no_grad():
        run = race({"plan": lambda: first(*inputs), "per_op": lambda: second(*inputs)}, device=device, seconds=2.0)
    plan_us, alone_us = run.times["plan"].median_us, run.times["per_op"].median_us
    if run.clear and plan_us <= _MARGIN * alone_us:
        return BlockReport(block, best, alone, True, plan_us, alone_us)
    kept = Path(alone.edges, best.considered)
    note = f"the joint path took {plan_us:.1f} µs, op by op {alone_us:.1f} µs: each op keeps its own choice"
    return BlockReport(block, kept, alone, True, alone_us, alone_us, note)
