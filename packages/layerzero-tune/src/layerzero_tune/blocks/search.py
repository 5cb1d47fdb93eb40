"""The cheapest way through a block: a shortest path whose edges are kernels, fused ops and changes of layout.

A node is a position in the block and the way its live tensors lie in memory; an edge runs a stretch of steps. Edges
are run once on the real tensors, so that what a kernel leaves behind (strides, dtypes) is known and not guessed, and
what the next one would have to transform is part of its price.

By itself a kernel finds its weight where its last call has left it; in a layer the other steps have been there since,
and of two kernels that were alike the one that reads its weight better is ahead. So a path found is run step by step
with a clock at each step, and the kernels that may stand there take turns (`time_in_place`). Only on a CPU: the clock
of a GPU overwrites the cache between calls as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.modes import tensors_of
from layerzero.dispatch.run import decide, describe
from layerzero.errors import BackendNotAvailableError, KernelExecutionError, from_outside
from layerzero.model.op import OperationSpec
from layerzero.runtime.state import state
from layerzero.selection.engine import refuse
from layerzero.selection.world import World, unchecked
from layerzero_tune.blocks.block import GLUE, Block, Step, Stretch, arguments, glue, results, stretches, unread
from layerzero_tune.blocks.cost import Cost, Meter
from layerzero_tune.timing.clock import Clock, clock_for

_CANDIDATES = 4  # kernels tried for a step, the best of the ranking
_RIVAL = 1.5  # times the price of another: timed by itself a kernel can seem so much slower and not be


@dataclass(frozen=True)
class Taken:
    """A step of a path with the kernel that runs it; glue has none."""

    step: Step
    cost: Cost
    spec: OperationSpec | None = None
    bound: Bound | None = None
    # Kernels that may stand here as well: they leave their results alike, and none is out of the question.
    rivals: tuple[Bound, ...] = field(default=(), repr=False, compare=False)

    @property
    def kernel_id(self) -> str:
        return "" if self.bound is None else self.bound.kernel_id


@dataclass(frozen=True)
class Edge:
    """One way over a stretch of the block."""

    start: int
    end: int
    rule: str
    taken: tuple[Taken, ...]
    # Not what selection would do at this step: it has to be better by more than the noise.
    other: bool = False

    @property
    def us(self) -> float:
        return sum(item.cost.us for item in self.taken)

    @property
    def words(self) -> str:
        """Kernels in order; glue that computes by its name."""
        told = [item for item in self.taken if item.step.op not in ("heads", "pack")]
        return " + ".join(item.kernel_id or item.step.op for item in told)


@dataclass(frozen=True)
class Path:
    """Edges from the first step to the last, and every edge that was looked at."""

    edges: tuple[Edge, ...]
    considered: tuple[Edge, ...] = field(default=(), repr=False)

    @property
    def us(self) -> float:
        return sum(edge.us for edge in self.edges)

    @property
    def taken(self) -> tuple[Taken, ...]:
        return tuple(item for edge in self.edges for item in edge.taken)


def told(path: Path) -> list[Any]:
    """What a path runs: kernels, and steps without one."""
    return [(item.kernel_id, item.step) for item in path.taken]


@dataclass(frozen=True)
class _Node:
    us: float
    tensors: Mapping[str, Any]
    edges: tuple[Edge, ...]


def search(block: Block, tensors: Mapping[str, Any], world: World, meter: Meter) -> Path:
    """The cheapest path. Of equally cheap ones the first found stays, so that two searches agree."""
    weights = {name: tensors.get(name) for name in block.weights}
    frontier: list[dict[Any, _Node]] = [{} for _ in range(len(block.steps) + 1)]
    frontier[0][None] = _Node(0.0, tensors, ())
    considered: list[Edge] = []
    for position in range(len(block.steps)):
        for node in frontier[position].values():
            for stretch in stretches(block, position, weights):
                for edge, after in _edges(position, stretch, node.tensors, world, meter, _CANDIDATES):
                    considered.append(edge)
                    live = block.live(edge.end)
                    keep = {*live, *block.inputs, *block.weights}
                    kept = {name: item for name, item in after.items() if name in keep or name.startswith("packed_")}
                    key = _looks([kept.get(name) for name in live])  # two ways that end alike go on alike
                    total = node.us + edge.us * (1.0 + world.measurements.noise if edge.other else 1.0)
                    best = frontier[edge.end].get(key)
                    if best is None or total < best.us:
                        frontier[edge.end][key] = _Node(total, kept, (*node.edges, edge))
        frontier[position].clear()  # its tensors are not needed any more
    last = min(frontier[-1].values(), key=lambda node: node.us)
    return Path(last.edges, tuple(considered))


def per_op(block: Block, tensors: Mapping[str, Any], world: World, meter: Meter, candidates: int = 1) -> Path:
    """The path of the public functions called one by one: the block's own steps, each with the kernel selection gives
    it now, or the cheapest of several. This is what a joint path has to beat, and what runs where it does not."""
    edges: list[Edge] = []
    for position, step in enumerate(block.steps):
        ways = list(_edges(position, Stretch((step,), 1), tensors, world, meter, candidates))
        edge, tensors = min(ways, key=lambda way: way[0].us * (1.0 + world.measurements.noise * way[0].other))
        edges.append(edge)
    return Path(tuple(edges))


def fastest_each(block: Block, tensors: Mapping[str, Any], world: World, meter: Meter) -> Path:
    """The block's own steps, each with the kernel that is cheapest for the step alone. For comparisons."""
    return per_op(block, tensors, world, meter, _CANDIDATES)


def _edges(
    start: int, stretch: Stretch, tensors: Mapping[str, Any], world: World, meter: Meter, candidates: int
) -> Iterator[tuple[Edge, dict[str, Any]]]:
    """Every way to run a stretch: each kernel where it has a single op, the cheapest of each where it has several."""
    ops = [step for step in stretch.steps if step.op not in GLUE]
    ways: list[tuple[tuple[Taken, ...], dict[str, Any]]] = [((), dict(tensors))]
    for step in stretch.steps:
        grown: list[tuple[tuple[Taken, ...], dict[str, Any]]] = []
        for taken, known in ways:
            found = list(_ways(step, known, world, meter, candidates))
            if len(ops) > 1 and found:
                found = [min(found, key=lambda way: way[0].cost.us)]
            for item, outs in found:
                grown.append(((*taken, item), {**known, **dict(zip(step.outputs, outs, strict=True))}))
        ways = grown
    for taken, known in ways:
        own = not stretch.rule and all(t.kernel_id == t.bound.decision.chosen for t in taken if t.bound is not None)
        yield Edge(start, start + stretch.length, stretch.rule, taken, other=not own), known


def _ways(
    step: Step, tensors: Mapping[str, Any], world: World, meter: Meter, candidates: int
) -> Iterator[tuple[Taken, tuple[Any, ...]]]:
    args = arguments(step, tensors)
    if step.op in GLUE:
        outs = glue(step.op, args)
        # Weights are packed once, when the block is planned.
        cost = Cost(0.0, "estimated") if step.op == "pack" else meter.glue(step.op, lambda: glue(step.op, args), args)
        yield Taken(step, cost), outs
        return
    spec = world.ops[step.op]
    layout = step.op_layout
    ctx = describe(spec, args, layout, None, world)
    decision = decide(spec, ctx, world)
    if not decision.chosen:
        raise refuse(decision)
    turns = _turning(step, tensors, meter)
    ready: list[tuple[Bound, tuple[Any, ...]]] = []
    failures: list[str] = []
    for kernel_id in decision.ranking:
        if len(ready) == candidates:
            break
        if kernel_id in world.registry.kernels and unchecked(spec, world.registry.kernels[kernel_id], ctx, world):
            continue  # a block holds its kernels for good: only those that are proven
        try:
            bound = bind(spec, decision, world, kernel_id)
            with torch.no_grad():
                outs = results(step, bound.run(*args))
            if decision.context.needs_grad:  # what comes next is asked for a gradient too
                real = [isinstance(item, Tensor) and item.is_floating_point() for item in outs]
                outs = tuple(o.detach().requires_grad_() if yes else o for o, yes in zip(outs, real, strict=True))
        except BackendNotAvailableError as error:
            state.unbindable(kernel_id, error.reasons[0])
            continue
        except Exception as error:  # it cannot run here, so it is no way through; dispatch would move on as well
            if from_outside(error):
                raise
            failures.append(f"{kernel_id}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if meter.right(bound.kernel, decision.context, bound.run, args):
            ready.append((bound, outs))
    if not ready:
        raise KernelExecutionError(f"{step.op}: no candidate could run; " + "; ".join(failures), code="KERNEL_RAISED")
    prices = meter.kernels([bound for bound, _ in ready], decision.context, args)
    for (bound, outs), cost in zip(ready, prices, strict=True):
        rivals = tuple(
            other
            for (other, left), price in zip(ready, prices, strict=True)
            if other is not bound
            and other.kernel_id != spec.fallback_id  # the reference often is another's kernel by another name
            and price.us <= _RIVAL * cost.us
            and _looks(left) == _looks(outs)
        )
        yield Taken(step, Cost(cost.us + turns, cost.source), spec, bound, rivals), outs


def _turning(step: Step, tensors: Mapping[str, Any], meter: Meter) -> float:
    """What it takes to look at tensors, or to copy them, with the heads first: five views are as long as a launch."""
    count = step.heads_first
    if not count:
        return 0.0
    first = replace(step, args=step.args[:count])
    given = arguments(replace(first, layout=None), tensors)
    made = given[: len(step.outputs)]
    turned = meter.glue("turn" if step.layout == "BHSD" else "turn and copy", lambda: arguments(first, tensors), given)
    return turned.us + meter.glue("turn back", lambda: results(step, made), made).us


def _looks(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else None for t in items)


_SPENT_US = 1e6
_FEWEST, _MOST = 7, 150  # turns, by how long the block takes


@dataclass(frozen=True)
class _Place:
    """Steps that are the same call, and the kernels that may run it."""

    steps: tuple[int, ...]
    args: tuple[Any, ...]
    kernels: tuple[Bound, ...]


def in_place(path: Path) -> bool:
    """Whether every kernel of a path has the price of its place."""
    return all(item.cost.source == "in place" for item in path.taken if item.bound is not None)


def time_in_place(block: Block, tensors: Mapping[str, Any], path: Path, meter: Meter) -> None:
    """Tell the meter what the kernels of a path, and those that may stand in their places, take there.

    Steps that are the same call count as one place, so that a layer does not end up with two kernels for two halves of
    one projection. A kernel that raises ends it: nothing is told, and the plan itself moves on when it is called.
    """
    clock = clock_for("cpu")
    with torch.no_grad():
        walk = _Walk(block, tensors, path.taken, clock)
        try:
            places = walk.places()
            most = max((len(place.kernels) for place in places), default=0)
            if not most:
                return
            once = clock(lambda: walk({}), 1)
            count = max(_FEWEST, min(_MOST, int(_SPENT_US / max(once * most, 1.0))))
            found = _turns(walk, places, most, count)
        except Exception as error:
            if from_outside(error):
                raise
            return
    for place, turns in zip(places, found, strict=True):
        meter.place([bound.kernel for bound in place.kernels], place.kernels[0].decision.context, place.args, turns)


def _turns(walk: _Walk, places: Sequence[_Place], most: int, count: int) -> list[list[list[float]]]:
    """For every place, turn by turn, µs of each of its kernels; who comes first in a turn is drawn anew."""
    draw = random.Random(0)
    found: list[list[list[float]]] = [[] for _ in places]
    for _ in range(count):
        orders = [draw.sample(range(len(place.kernels)), len(place.kernels)) for place in places]
        turn = [[0.0] * len(place.kernels) for place in places]
        for number in range(most):
            now = [order[number % len(order)] for order in orders]
            bounds = {step: place.kernels[who] for place, who in zip(places, now, strict=True) for step in place.steps}
            taken = walk(bounds)
            for place, who, samples in zip(places, now, turn, strict=True):
                samples[who] = sum(taken[step] for step in place.steps) / len(place.steps)
        for samples, turns in zip(turn, found, strict=True):
            turns.append(samples)
    return found


class _Walk:
    """A path run step by step, with a clock at each kernel."""

    def __init__(self, block: Block, tensors: Mapping[str, Any], taken: Sequence[Taken], clock: Clock) -> None:
        self._known = {name: tensors.get(name) for name in (*block.inputs, *block.weights)}
        for item in taken:
            if item.step.op == "pack":
                self._known.update(zip(item.step.outputs, glue("pack", arguments(item.step, self._known)), strict=True))
        self._taken = [item for item in taken if item.step.op != "pack"]
        steps = [item.step for item in self._taken]
        self._unread = [unread(block, steps, number) for number in range(len(steps))]
        self._clock = clock

    def __call__(self, bounds: Mapping[int, Bound], seen: Callable[[int, Any], None] | None = None) -> list[float]:
        """µs of each step's kernel, 0 for glue; `bounds` has the kernels of steps that do not run the path's own."""
        tensors, found = dict(self._known), []
        out: Any = None
        for number, item in enumerate(self._taken):
            args = arguments(item.step, tensors)
            if seen is not None:
                seen(number, args)
            bound = bounds.get(number, item.bound)
            if bound is None:
                found.append(0.0)
                outs = glue(item.step.op, args)
            else:
                run = bound.run

                def call() -> None:
                    nonlocal out
                    out = run(*args)  # noqa: B023  (called right here)

                found.append(self._clock(call, 1))
                outs, out = results(item.step, out), None
            tensors.update(zip(item.step.outputs, outs, strict=True))
            for name in self._unread[number]:
                del tensors[name]
        return found

    def places(self) -> list[_Place]:
        """The calls of the path, each with its kernels; run once to see the arguments."""
        groups: dict[Any, tuple[list[int], tuple[Any, ...], dict[str, Bound]]] = {}

        def seen(number: int, args: tuple[Any, ...]) -> None:
            item = self._taken[number]
            if item.bound is None:
                return
            looks = tuple((t.shape, t.stride()) for t in tensors_of(args))
            steps, _, kernels = groups.setdefault((item.bound.decision.context, looks), ([], args, {}))
            steps.append(number)
            for bound in (item.bound, *item.rivals):
                kernels.setdefault(bound.kernel_id, bound)

        self({}, seen)
        return [
            _Place(tuple(steps), args, tuple(kernels[name] for name in sorted(kernels)))
            for steps, args, kernels in groups.values()
        ]
