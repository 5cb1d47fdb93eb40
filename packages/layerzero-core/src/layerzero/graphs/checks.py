"""`lz.is_graph_safe`, `lz.validate_graph_capture` and `lz.capture_graph`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerzero._ops.signature import PUBLIC, public_op
from layerzero.dispatch.run import current_world, decide, describe
from layerzero.errors import LayerZeroError
from layerzero.graphs.capture import GraphedCall, Settings, capture
from layerzero.graphs.rehearsal import CaptureReport, Watch, rehearsal
from layerzero.model.context import Context
from layerzero.numerics.compare import compare
from layerzero.numerics.tolerances import dtype_name, tolerance
from layerzero.policy.rules import matches_any
from layerzero.reasons import Reason, reason


def is_graph_safe(name: str, *args: Any, **kwargs: Any) -> bool:
    """Whether a kernel, by its id, or a call of an op may stand in a CUDA graph.

    A kernel is safe when its backend says so, and under `graph_strict_mode` with a `graph_whitelist` also that list; a
    kernel that says nothing is not. With an op's name and its arguments: whether some kernel may run that call.
    """
    world = current_world()
    kernel = world.registry.kernels.get(name)
    if kernel is None:
        return bool(decide(public_op(name), _captured_context(name, args, kwargs), world).chosen)
    if args or kwargs:
        decision = decide(public_op(kernel.op), _captured_context(kernel.op, args, kwargs), world)
        return decision.candidate(name).accepted
    policy = world.policy
    if not kernel.graph_safe or kernel.backend in world.enclosed:
        return False
    if policy.graph_strict_mode and policy.graph_whitelist:
        return matches_any(policy.graph_whitelist, kernel.kernel_id, kernel.backend) is not None
    return True


def _captured_context(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Context:
    if len(args) == 1 and isinstance(args[0], Context) and not kwargs:
        return replace(args[0], capturing=True)
    public = public_op(op)
    canonical, layout, backend = public.normalize(args, kwargs)
    return replace(describe(public, canonical, layout, backend, current_world()), capturing=True)


def capture_graph(
    function: Callable[..., Any],
    *args: Any,
    warmup: int = 3,
    stream: Any = None,
    pool: Any = None,
    strict: bool | None = None,
    memory_limit: int = 1 << 20,
    **kwargs: Any,
) -> GraphedCall:
    """`function(*args, **kwargs)` as a CUDA graph, for inference: call what comes back with other tensors.

    Tensors among the arguments are the inputs, copied into place before each replay; all the function closes over
    (weights, caches) is used where it lies. It is run `warmup` times first, on the stream of the capture, with cuBLAS
    and cuDNN made ready there, and selects as in a capture from the first run on. `strict` (by default the policy's
    `graph_strict_mode`) adds a dummy capture of each kernel and of the whole, into the same memory pool, after which
    the capture itself may grow memory by `memory_limit` bytes at most. A kernel that fails is set aside and the next
    best taken; `.report` names both. CudaGraphUnsafeError where no graph can be had, with the reasons.
    """
    careful = current_world().policy.graph_strict_mode if strict is None else strict
    return capture(function, args, kwargs, Settings(warmup, stream, pool, careful, memory_limit))


def validate_graph_capture(
    function: Callable[..., Any] | str,
    *args: Any,
    warmup: int = 3,
    stream: Any = None,
    memory_limit: int = 1 << 20,
    replays: int = 2,
    **kwargs: Any,
) -> CaptureReport:
    """Try a strict capture of a function, or of one op by its name, and compare replays with the function itself.

    Nothing is kept. The report is true when a graph can be had; else its reasons say why not. Never raises for that.
    """
    if isinstance(function, str):
        function = public_op(function).function
    how = Settings(warmup, stream, None, True, memory_limit)
    try:
        made = capture(function, args, kwargs, how)
    except LayerZeroError as error:
        return CaptureReport(False, reasons=tuple(error.reasons))
    wrong = _compared(function, made, replays)
    if wrong is None:
        return replace(made.report, replays=replays)
    return replace(made.report, ok=False, reasons=(wrong,), replays=replays)


def _compared(function: Callable[..., Any], made: GraphedCall, replays: int) -> Reason | None:
    """Replay on the inputs, and on those inputs with their rows in another order; None: as the function computes."""
    ops = {op for op, _ in made.kernels}
    op = next(iter(ops)) if len(ops) == 1 and ops <= set(PUBLIC) else ""
    for turn in range(replays):
        if turn:
            for item in made.inputs.tensors:
                if item.is_floating_point() and item.dim():
                    item.copy_(item.flip(0))
        with torch.no_grad(), rehearsal(Watch(), made.report.refused):  # by the kernels of the graph
            want = _results(function(*made.inputs.args, **made.inputs.kwargs))
        got = _results(made.replay())
        torch.cuda.synchronize(made.device)
        for left, right in zip(got, want, strict=True):
            if not left.dtype.is_complex and left.dtype.itemsize > 1:
                found = compare(left, right, tolerance(op, dtype_name(left.dtype)))
                if not found.ok:
                    return reason("GRAPH_RESULT_DIFFERS", str(found).splitlines()[0], detail=f"replay {turn + 1}")
            elif not torch.equal(left, right):
                return reason("GRAPH_RESULT_DIFFERS", f"{left.dtype} {tuple(left.shape)}", detail=f"replay {turn + 1}")
    return None


def _results(out: Any) -> list[Tensor]:
    return [item.clone() for item in pytree.tree_leaves(out) if isinstance(item, Tensor)]
