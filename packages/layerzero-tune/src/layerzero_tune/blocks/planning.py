"""`lz.plan_block`: several ops planned together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from layerzero.dispatch.run import current_world
from layerzero.errors import InvalidInputError
from layerzero.measurements.noise import alike
from layerzero.selection.world import World
from layerzero_tune.blocks.block import Block
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.in_place import in_place, time_in_place
from layerzero_tune.blocks.plan import BlockPlan, BlockReport, signature
from layerzero_tune.blocks.search import Path, fastest_each, per_op, search, told
from layerzero_tune.timing.clock import Clock, clock_for
from layerzero_tune.timing.race import Times, race

# Another path than that of the public functions has to be faster by more than this, and by more than the spread of the
# times; else it is not worth its packed weights.
_NOISE = 0.02
_WALKS = 2  # a path found by what kernels took in place may have others, which have not been timed there
_RACE_US = 5e6
_FEWEST, _MOST = 12, 120  # rounds, by how long a call takes


def plan_block(
    block: Block, tensors: Mapping[str, Any], *, measure: bool | None = None, check: bool = False
) -> BlockPlan:
    """Plan a block of ops jointly and bind it to its weights; the plan is called with the block's inputs.

        from layerzero_tune.blocks.block import decoder_layer
        plan = lz.plan_block(decoder_layer(heads=32, kv_heads=8), {"x": x, "cos": cos, "sin": sin, "ln1": ln1, ...})
        out = plan(x, cos, sin)
        print(plan.explain())

    The path through the block is the cheapest over kernels, fused ops, packed projections and layouts, the transforms
    between them counted. Times come from the performance database where it has them; else they are estimated, or with
    `measure=True` taken here, every kernel checked against the reference first, and the plan itself is raced against
    choosing for each op alone and dropped where it does not win; None leaves that to `plan_mode` of the policy.
    `print(plan.code)` shows the function that runs: one line a step. Plans are cached by block and tensors until
    anything changes that selection depends on. `check=True` verifies the inputs of each call.
    """
    if not isinstance(block, Block):
        raise InvalidInputError(code="TYPE_INVALID", value=type(block).__name__, limit="a layerzero_tune.blocks.Block")
    block.check(tensors)
    world = current_world()
    measure = world.policy.plan_mode if measure is None else measure
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
    each = fastest_each(block, tensors, world, meter)
    for _ in range(_WALKS if _device(tensors).type == "cpu" else 0):
        news = [path for path in (each, best) if not in_place(path)]
        for path in news:
            time_in_place(block, tensors, path, meter)
        if not news:
            break
        best, each = search(block, tensors, world, meter), fastest_each(block, tensors, world, meter)
        alone = per_op(block, tensors, world, meter)  # the same kernels, by what they take in place
    return _raced(block, tensors, best, each, alone)


def _raced(block: Block, tensors: Mapping[str, Any], best: Path, each: Path, alone: Path) -> BlockReport:
    """The cheapest path, the cheapest without rewrites and op by op, in turns, on the real tensors: sums of single
    times are no proof."""
    inputs = [tensors.get(name) for name in block.inputs]
    ways = {"per_op": alone, "each": Path(each.edges, best.considered), "plan": best}
    plans: dict[str, BlockPlan] = {}
    seen: list[Any] = []
    for name, way in ways.items():
        if told(way) not in seen:  # nobody runs against itself
            seen.append(told(way))
            plans[name] = BlockPlan(block, tensors, BlockReport(block, way, alone, measured=True))
    device = _device(tensors)
    contestants = {name: functools.partial(plan, *inputs) for name, plan in plans.items()}
    with torch.no_grad():
        run = race(contestants, device=device, settle=True, rounds=_rounds(contestants.values(), clock_for(device)))
    alone_us = run.times["per_op"].median_us
    chosen = _ahead(run.times)
    if chosen != "per_op":
        return BlockReport(block, ways[chosen], alone, True, run.times[chosen].median_us, alone_us)
    others = {name: item.median_us for name, item in run.times.items() if name != "per_op"}
    took = f"the joint path took {others.get('plan', min(others.values())):.1f} µs, " if others else ""
    note = f"{took}op by op {alone_us:.1f} µs: each op keeps its own choice"
    return BlockReport(block, Path(alone.edges, best.considered), alone, True, alone_us, alone_us, note)


def _device(tensors: Mapping[str, Any]) -> torch.device:
    return next(item.device for item in tensors.values() if isinstance(item, torch.Tensor))


def _ahead(times: Mapping[str, Times]) -> str:
    """Whose path is taken: one that is clearly behind none of the others, the plainest of these."""
    best = min(times.values(), key=lambda item: item.median_us)
    for name, item in times.items():  # the plainest first
        if alike(best.median_us, best.error_us, item.median_us, item.error_us, _NOISE):
            return name
    raise AssertionError("the fastest is like itself")


def _rounds(calls: Collection[Callable[[], Any]], clock: Clock) -> int:
    """As many as there is time for, once everybody has been called."""
    for call in calls:
        call()
    spent = sum(clock(call, 1) for call in calls)
    return max(_FEWEST, min(_MOST, int(_RACE_US / max(spent, 1.0))))
