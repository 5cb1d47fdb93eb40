"""`lz.select`, `lz.explain`, `lz.which` and the lists: the same decision that dispatch uses, looked at."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, overload

import torch

from layerzero._ops.signature import public_op
from layerzero.dispatch.bind import Bound
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.decision import Decision, ExecutionPlan
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import OperationSpec
from layerzero.public.control import must_compute
from layerzero.reasons import Reason
from layerzero.runtime.state import state
from layerzero.selection.engine import refuse
from layerzero.telemetry.report import SelectionReport


def select(op: str, *args: Any, compiled: bool = False, **kwargs: Any) -> Decision:
    """The decision for a call (its own arguments, or one Context). Raises when nothing may run.

    `compiled` asks for the decision inside a graph of torch.compile, where no gradient is traced.
    """
    decision, _ = _decided(op, args, kwargs, compiled)
    if not decision.chosen:
        raise refuse(decision)
    return decision


def _decided(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> tuple[Decision, Context]:
    world = current_world()
    if len(args) == 1 and isinstance(args[0], Context) and not kwargs:
        spec, ctx = world.ops.get(op) or public_op(op), args[0]  # public_op raises with the nearest names
        if ctx.op != op:
            raise InvalidInputError(f"a context of {ctx.op}", code="VALUE_INVALID", value=ctx.op, limit=op)
    else:
        spec = public = public_op(op)
        canonical, layout, backend = public.normalize(args, kwargs)
        ctx = describe(public, canonical, layout, backend, world)
    decision = decide(spec, ctx, world)
    if compiled:
        from layerzero.torch_ops.basis import compiled as in_graph

        decision = in_graph(decision, world)
    return decision, ctx


@overload
def explain(op: str, *args: Any, compiled: bool = False, **kwargs: Any) -> SelectionReport: ...
@overload
def explain(op: Callable[..., Any], example_inputs: Any = (), /) -> ModelReport: ...
def explain(
    op: str | Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any
) -> SelectionReport | ModelReport:
    """Which kernel a call would run, and why not the others. Nothing is executed; a refusal is reported, not raised.

    For a model (or any function) and its example inputs, `lz.explain(model, inputs)`: the model runs once, and every
    call that it makes is reported with the part it was made in, the kernel that ran and the reasons. The inputs are a
    tuple, a mapping of named ones, or the only one.

    `compiled` explains the call inside a graph of torch.compile, where no gradient is traced: which kernel is written
    into the graph, or is one opaque op in it.
    """
    if not isinstance(op, str):
        return explain_model(op, *args, **kwargs)
    decision, ctx = _decided(op, args, kwargs, compiled)
    ran = None if compiled else state.ran.get((decision.context, decision.policy_hash))
    return SelectionReport(decision, ctx, ran)


def which(op: str, *args: Any, compiled: bool = False, **kwargs: Any) -> str:
    """The id of the kernel that a call would run, eagerly or (`compiled=True`) inside a torch.compile graph."""
    return select(op, *args, compiled=compiled, **kwargs).chosen


def dry_run(op: str, *args: Any, **kwargs: Any) -> ExecutionPlan:
    """The plan of a call: kernel, transforms and the decision behind them. Imports no vendor, runs nothing."""
    return ExecutionPlan.of(select(op, *args, **kwargs))


def list_kernels(
    op: str | None = None, *, backend: str | None = None, available: bool | None = None
) -> list[KernelSpec]:
    """Registered kernels, by op and backend; `available=True` keeps those whose backend can be used in this process."""
    world = current_world()
    if op is not None and op not in world.ops:
        public_op(op)  # raises with the nearest names
    found = [
        kernel
        for kernel in world.registry.kernels.values()
        if op in (None, kernel.op) and backend in (None, kernel.backend)
        if available in (None, world.registry.available(kernel.backend) and kernel.kernel_id not in world.unbindable)
    ]
    return sorted(found, key=lambda kernel: (kernel.op, -kernel.priority, kernel.kernel_id))


def list_ops() -> list[OperationSpec]:
    """Every op, with its canonical arguments."""
    return sorted(current_world().ops.values(), key=lambda spec: spec.op_id)


def validate(kernel_id: str, *args: Any, op: str | None = None, **kwargs: Any) -> list[Reason]:
    """Every reason against running this kernel for a call; an empty list means it may run.

    The arguments are those of the kernel's op, or one Context. A kernel that may run but would not win is
    valid: only reasons that forbid are listed.
    """
    kernel = current_world().registry.get(kernel_id)
    report = explain(op or kernel.op, *args, **kwargs)
    must_compute(kernel, report.op)
    candidate = report.decision.candidate(kernel_id)
    return [] if candidate.accepted else list(candidate.reasons)


# -- a model, part by part ---------------------------------------------------------------------------------------
# The model runs once. Meanwhile no call is hot, so that each comes by the place where it is decided. The module that
# made it is found among the callers: hooks would tell as well, but a patched model leaves its fused paths for them.
@dataclass(frozen=True, slots=True)
class ModelCall:
    """Calls of an op with the same sizes in one part of the model, or in parts that differ by a number alone.

    part    name of the module as `named_modules` says it, numbers replaced by *; "" where there is none
    ran     the kernel that ran, `count` how often; `report` says why it and not another
    """

    part: str
    ran: str
    count: int
    report: SelectionReport

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "ran": self.ran, "count": self.count, **self.report.to_dict()}

    @property
    def why(self) -> str:
        """The time it is expected to take, or what it was ranked by."""
        winner = self.report.decision.candidate(self.ran)
        return winner.speed or f"ranked by {winner.source}"

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.report.context.dims)
        return f"{self.count:5} × {self.ran}  {self.why}\n        {self.part or 'the model'}: {self.report.op} {sizes}"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `lz.explain` returns for a model; `calls` in the order in which they were first made."""

    calls: tuple[ModelCall, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel id → how many calls it ran, the most first."""
        counts: Counter[str] = Counter()
        for call in self.calls:
            counts[call.ran] += call.count
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        return {"kernels": self.kernels, "calls": [call.to_json() for call in self.calls]}

    def __str__(self) -> str:
        if not self.calls:
            return "no op of LayerZero was called: lz.patch(model) lets a model call them"
        return "\n".join((f"{sum(self.kernels.values())} calls of {len(self.kernels)} kernels", *map(str, self.calls)))


class _Watch:
    """Stands where a World keeps its tally; forgets every call that was made hot, so that the next comes by as well."""

    def __init__(self, model: Any) -> None:
        modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        self._names: dict[int, str] = {id(module): name for name, module in modules}
        self.met_calls: Counter[tuple[str, Context, str]] = Counter()

    def table(self) -> dict[Any, Any]:
        return {}

    def met(
        self, hot: dict[Any, Any], keys: tuple[Any, Any], ctx: Context, bound: Bound, args: tuple[Any, ...]
    ) -> None:
        """A call was decided and is about to run."""
        for key in keys:
            hot.pop(key, None)
        part = re.sub(r"(?<![^.])\d+(?![^.])", "*", self._part(sys._getframe(1)))
        self.met_calls[part, ctx, bound.kernel_id] += 1

    def _part(self, frame: FrameType | None) -> str:
        """The name of the nearest module whose method, or function of it, is being called."""
        while frame is not None and self._names:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            name = self._names.get(id(frame.f_locals.get(first[0]))) if first else None
            if name is not None:
                return name
            frame = frame.f_back
        return ""


def explain_model(model: Callable[..., Any], inputs: Any) -> ModelReport:
    """Run a model or a function once, without gradients, and report its calls.

    `inputs` are a tuple of positional arguments, a mapping of named ones, or the only argument.
    """
    watch, before = _Watch(model), state.tally
    _ = state.world
    state.record(watch)
    try:
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    finally:
        state.record(before)
    found = watch.met_calls.items()
    return ModelReport(tuple(ModelCall(part, ran, n, explain(ctx.op, ctx)) for (part, ctx, ran), n in found))
