"""A planned block: the path as functions, run in order, and the report that says why it is this path."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from layerzero.dispatch.bind import Bound, bind
from layerzero.dispatch.modes import carries_tangent, tensors_of
from layerzero.dispatch.run import current_world, decide
from layerzero.errors import BackendNotAvailableError, KernelExecutionError, PlanMismatchError, invalid
from layerzero.torch_ops.imports import after_import
from layerzero_cli.output import Line, Table, show
from layerzero_tune.blocks.block import Block, arguments, glue
from layerzero_tune.blocks.code import written
from layerzero_tune.blocks.search import Path, Taken


def signature(block: Block, tensors: Mapping[str, Any], measure: bool) -> Any:
    """What a plan depends on besides the World: the block, and how its tensors look."""
    return block, tuple(_look(tensors.get(name)) for name in (*block.inputs, *block.weights)), measure


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
        """Adaptations of inputs on the path."""
        return sum(len(item.bound.plan.transforms) for item in self.path.taken if item.bound is not None)

    @property
    def fused(self) -> tuple[str, ...]:
        """Rules that put several steps into one."""
        return tuple(edge.rule for edge in self.path.edges if edge.rule)

    def rejected(self) -> list[dict[str, Any]]:
        """Other ways over stretches of the path, the nearest first, with what they would have added."""
        ends: dict[int, float] = {0: 0.0}
        total = 0.0
        for edge in self.path.edges:
            total += edge.us
            ends[edge.end] = total
        best: dict[Any, dict[str, Any]] = {}
        chosen = {(edge.start, edge.end, edge.rule, edge.words) for edge in self.path.edges}
        for edge in self.path.considered:
            key = (edge.start, edge.end, edge.rule, edge.words)
            if key in chosen or edge.start not in ends or edge.end not in ends:
                continue
            extra = edge.us - (ends[edge.end] - ends[edge.start])
            if key not in best or extra < best[key]["extra_us"]:
                steps = [step.op for step in self.block.steps[edge.start : edge.end]]
                best[key] = {"steps": steps, "way": edge.words, "rule": edge.rule, "us": edge.us, "extra_us": extra}
        return sorted(best.values(), key=lambda row: float(row["extra_us"]))

    def to_json(self) -> dict[str, Any]:
        return {
            "block": self.block.name,
            "estimated_us": round(self.path.us, 3),
            "per_op_estimated_us": round(self.alone.us, 3),
            "plan_us": self.plan_us,
            "per_op_us": self.alone_us,
            "measured": self.measured,
            "transforms": self.transforms,
            "fused": list(self.fused),
            "note": self.note,
            "path": [
                {
                    "steps": [step.op for step in self.block.steps[edge.start : edge.end]],
                    "way": edge.words,
                    "rule": edge.rule,
                    "us": round(edge.us, 3),
                    "source": sorted({item.cost.source for item in edge.taken}),
                }
                for edge in self.path.edges
            ],
            "rejected": [
                {**row, "us": round(row["us"], 3), "extra_us": round(row["extra_us"], 3)} for row in self.rejected()
            ],
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
        if found != self._wanted:
            assert self._wanted is not None
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
