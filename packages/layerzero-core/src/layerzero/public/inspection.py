"""`lz.select`, `lz.explain`, `lz.which` and the lists: the same decision that dispatch uses, looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from layerzero._ops.signature import public_op
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

if TYPE_CHECKING:
    from layerzero.public.model_report import ModelReport


def _context(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OperationSpec, Context]:
    world = current_world()
    if len(args) == 1 and isinstance(args[0], Context) and not kwargs:
        spec = world.ops.get(op) or public_op(op)  # which raises with the nearest names
        if args[0].op != op:
            raise InvalidInputError(f"a context of {args[0].op}", code="VALUE_INVALID", value=args[0].op, limit=op)
        return spec, args[0]
    public = public_op(op)
    canonical, layout, backend = public.normalize(args, kwargs)
    return public, describe(public, canonical, layout, backend, world)


def select(op: str, *args: Any, compiled: bool = False, **kwargs: Any) -> Decision:
    """The decision for a call (its own arguments, or one Context). Raises when nothing may run.

    `compiled` asks for the decision inside a graph of torch.compile, where no gradient is traced.
    """
    decision, _ = _decided(op, args, kwargs, compiled)
    if not decision.chosen:
        raise refuse(decision)
    return decision


def _decided(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> tuple[Decision, Context]:
    spec, ctx = _context(op, args, kwargs)
    world = current_world()
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
        from layerzero.public.model_report import explain_model

        return explain_model(op, *args, **kwargs)
    decision, ctx = _decided(op, args, kwargs, compiled)
    ran = None if compiled else state.ran.get((decision.context, decision.policy_hash))
    return SelectionReport(decision, ctx, ran)


def which(op: str, *args: Any, compiled: bool = False, **kwargs: Any) -> str:
    """The kernel id a call would run, by itself or inside a graph of torch.compile."""
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
