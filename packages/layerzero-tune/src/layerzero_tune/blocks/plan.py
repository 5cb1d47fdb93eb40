"""`lz.plan_block`: the cheapest path through a block as one function, and the report that says why it is this path."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.modes import carries_tangent, tensors_of
from layerzero.dispatch.run import current_world, decide
from layerzero.errors import BackendNotAvailableError, KernelExecutionError, PlanMismatchError, invalid
from layerzero.json_form import plain
from layerzero.selection.world import World
from layerzero.torch_ops.imports import after_import
from layerzero_cli.output import Line, Table, show
from layerzero_tune.blocks.block import Block, arguments, glue
from layerzero_tune.blocks.code import written
from layerzero_tune.blocks.cost import Meter
from layerzero_tune.blocks.search import Edge, Path, Taken, fastest_each, in_place, per_op, search, time_in_place, told
from layerzero_tune.timing.clock import clock_for
from layerzero_tune.timing.race import race

# Another path than that of the public functions has to be faster by more than this, and by more than the spread of the
# times; else it is not worth its packed weights.
_NOISE = 0.02
_WALKS = 2  # a path found by what kernels took in place may have others, which have not been timed there
_RACE_US = 5e6
_FEWEST, _MOST = 12, 120  # rounds, by how long a call takes


def _look(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Tensor):
        return tuple(item.shape), item.dtype, item.stride(), item.device, item.requires_grad
    return (type(item),)


@dataclass(frozen=True)
class BlockReport:
    """Why a block is run as it is: the path, what it costs, what each op alone would cost, what was rejected."""

    block: Block
    path: Path
    alone: Path
    measured: bool
    plan_us: float | None = None
    alone_us: float | None = None
    note: str = ""

    @property
    def transforms(self) -> int:
        return sum(len(item.bound.plan.transforms) for item in self.path.taken if item.bound is not None)

    @property
    def fused(self) -> tuple[str, ...]:
        return tuple(edge.rule for edge in self.path.edges if edge.rule)

    def rejected(self) -> list[dict[str, Any]]:
        """Other ways over stretches of the path, the nearest first, with what they would have added."""
        ends: dict[int, float] = {0: 0.0}
        total = 0.0
        for edge in self.path.edges:
            total += edge.us
            ends[edge.end] = total
        best: dict[Any, tuple[float, Edge]] = {}
        chosen = {(edge.start, edge.end, edge.rule, edge.words) for edge in self.path.edges}
        for edge in self.path.considered:
            key = (edge.start, edge.end, edge.rule, edge.words)
            if key in chosen or edge.start not in ends or edge.end not in ends:
                continue
            extra = edge.us - (ends[edge.end] - ends[edge.start])
            if key not in best or extra < best[key][0]:
                best[key] = (extra, edge)
        ordered = sorted(best.values(), key=lambda item: item[0])
        return [{**self._row(edge), "extra_us": round(extra, 3)} for extra, edge in ordered]

    def _row(self, edge: Edge) -> dict[str, Any]:
        steps = [step.op for step in self.block.steps[edge.start : edge.end]]
        return {"steps": steps, "way": edge.words, "rule": edge.rule, "us": round(edge.us, 3)}

    def to_json(self) -> dict[str, Any]:
        return {
            "block": self.block.name,
            "estimated_us": round(self.path.us, 3),
            "per_op_estimated_us": round(self.alone.us, 3),
            **{name: plain(getattr(self, name)) for name in ("plan_us", "measured", "transforms", "fused", "note")},
            "per_op_us": self.alone_us,
            "path": [
                {**self._row(edge), "source": sorted({item.cost.source for item in edge.taken})}
                for edge in self.path.edges
            ],
            "rejected": self.rejected(),
        }

    def blocks(self) -> list[Line | Table]:
        """To be read: the path with its times, and the nearest of what was rejected."""
        found = self.to_json()
        times = f"{found['estimated_us']:.1f} µs on this path, {found['per_op_estimated_us']:.1f} µs op by op"
        if self.plan_us is not None:
            times += f"; run as a whole {self.plan_us:.1f} µs, op by op {self.alone_us:.1f} µs"
        path = [
            (f"{row['us']:.1f}", row["way"] or row["steps"][0], row["rule"], ", ".join(row["source"]))
            for row in found["path"]
        ]
        other = [
            (f"{row['extra_us']:+.1f}", row["way"], row["rule"], " + ".join(row["steps"]))
            for row in found["rejected"][:10]
        ]
        lines: list[Line | Table] = [Line(f"{self.block.name}: {times}")]
        lines.append(Table(("time", "path", "", "from"), path, indent=2, right=frozenset({0})))
        if other:
            lines += [Line("rejected:"), Table(("more", "instead", "", "for"), other, indent=2, right=frozenset({0}))]
        return [*lines, Line(self.note)] if self.note else lines

    def __str__(self) -> str:
        text = io.StringIO()
        show(self.blocks(), text)
        return text.getvalue().rstrip()


class BlockPlan:
    """A block bound to its weights. Call it with the inputs, in order or by name; it takes the same shapes each time.

    Unchecked by contract, as `lz.plan`: `check=True` verifies shapes at each call. A kernel that raises hands over to
    the next one of its op. Weights that a step had packed are packed again when they were written to.
    """

    def __init__(self, block: Block, tensors: Mapping[str, Any], report: BlockReport, *, check: bool = False) -> None:
        self.block = block
        self.report = report
        self._weights = {name: tensors.get(name) for name in block.weights}
        taken = report.path.taken
        self._packs = [item.step for item in taken if item.step.op == "pack"]
        self._code = written(block, [(item.step, item.spec, settled(item)) for item in taken if item.step.op != "pack"])
        self._sources: list[Tensor] = [tensors[name] for step in self._packs for name in step.reads()]
        self._wanted = _looks(block, tensors) if check else None
        self._count = len(block.inputs)
        self._seen: list[int] = []
        self._run: Callable[..., Any]
        self._pack()

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(item.kernel_id for item in self.report.path.taken if item.bound is not None)

    @property
    def code(self) -> str:
        return self._code.text

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the block; the result alone, or a tuple where the block has several."""
        if self._sources and [_version(item) for item in self._sources] != self._seen:
            self._pack()
        if named or len(inputs) != self._count:
            inputs = self._in_order(inputs, named)
        if self._wanted is not None:
            self._verify(inputs)
        if forward_ad._current_level >= 0 and carries_tangent(tensors_of((*inputs, *self._weights.values()))):
            raise KernelExecutionError(
                code="TRANSFORM_UNSUPPORTED", value=f"the block plan {self.block.name}", limit="the ops one by one"
            )
        return self._run(*inputs)

    def explain(self) -> BlockReport:
        return self.report

    def _pack(self) -> None:
        self._seen = [_version(item) for item in self._sources]
        known = dict(self._weights)
        for step in self._packs:
            known.update(zip(step.outputs, glue(step.op, arguments(step, known)), strict=True))
        self._run = self._code.bind(known)

    def _in_order(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Inputs given by name, at their places; one clear error for too many, too few, or a name that is none."""
        names = self.block.inputs
        given = dict(zip(names, inputs, strict=False))
        wrong = [name for name in named if name not in names or name in given]
        missing = [name for name in names if name not in given and name not in named]
        if wrong or missing or len(inputs) > len(names):
            told = ", ".join([f"{len(inputs)} in order", *named])
            every = ", ".join(names)
            message = f"a plan for {self.block.name} has each of {every} once, in order or by name; got {told}"
            raise invalid("VALUE_INVALID", told, every, message)
        given.update(named)
        return tuple(given[name] for name in names)

    def _verify(self, inputs: Sequence[Any]) -> None:
        found = _looks(self.block, dict(zip(self.block.inputs, inputs, strict=True)))
        if self._wanted is not None and found != self._wanted:
            wrong = next(name for name in self.block.inputs if found[name] != self._wanted[name])
            raise PlanMismatchError(
                f"block plan for {self.block.name}, input {wrong}", code="PLAN_ARGUMENTS_CHANGED",
                value=found[wrong], limit=self._wanted[wrong],
            )  # fmt: skip


def settled(item: Taken) -> Bound | None:
    """A step's kernel bound in the World of now, as dispatch would: what was compiled while the path was searched for
    needs no wrapper any more that asks whether it is."""
    bound, spec = item.bound, item.spec
    if bound is None or spec is None or not bound.kernel.jit:
        return bound
    world = current_world()
    decision = decide(spec, bound.decision.context, world)
    if bound.kernel_id not in decision.ranking:
        return bound
    try:
        return bind(spec, decision, world, bound.kernel_id, rng=bound.rng)
    except BackendNotAvailableError:  # the runner hands over to the next candidate when it is called
        return bound


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _looks(block: Block, tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: " ".join(map(str, _look(tensors.get(name))[:4])) for name in block.inputs}


def _leave_alone() -> None:
    from layerzero.torch_ops.dynamo import leave_alone

    leave_alone("layerzero_tune.blocks", BlockPlan.__call__.__code__)


after_import("torch._dynamo", _leave_alone)


# -- planning ----------------------------------------------------------------------------------------------------
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
        raise invalid("TYPE_INVALID", type(block).__name__, "a layerzero_tune.blocks.Block")
    block.check(tensors)
    world = current_world()
    measure = world.policy.plan_mode if measure is None else measure
    key = block, tuple(_look(tensors.get(name)) for name in (*block.inputs, *block.weights)), measure
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
        for call in contestants.values():
            call()
        spent = sum(clock_for(device)(call, 1) for call in contestants.values())
        # As many rounds as there is time for.
        rounds = max(_FEWEST, min(_MOST, int(_RACE_US / max(spent, 1.0))))
        run = race(contestants, device=device, settle=True, rounds=rounds)
    alone_us = run.times["per_op"].median_us
    first = min(run.times.values(), key=lambda item: item.median_us)
    # One that is clearly behind none of the others, the plainest of these: it comes first.
    chosen = next(name for name, item in run.times.items() if item.near(first, _NOISE))
    if chosen != "per_op":
        return BlockReport(block, ways[chosen], alone, True, run.times[chosen].median_us, alone_us)
    others = {name: item.median_us for name, item in run.times.items() if name != "per_op"}
    took = f"the joint path took {others.get('plan', min(others.values())):.1f} µs, " if others else ""
    note = f"{took}op by op {alone_us:.1f} µs: each op keeps its own choice"
    return BlockReport(block, Path(alone.edges, best.considered), alone, True, alone_us, alone_us, note)


def _device(tensors: Mapping[str, Any]) -> torch.device:
    return next(item.device for item in tensors.values() if isinstance(item, torch.Tensor))
