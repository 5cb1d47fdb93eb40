"""Kernels that are plain torch, written into a traced graph so that the compiler fuses across them.

`chosen` asks, while Dynamo traces an op, what shall stand in the graph (`basis`); `write` then runs that kernel's own
function, which Dynamo follows. `OPEN` are the functions it can follow: torch's own, SDPA, the reference, and those of
the inductor backend, which are the same formulas compiled one by one. All other kernels are opaque ops.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.decision import Decision
from layerzero.selection.world import World
from layerzero.torch_ops import attention_forms, basis, sites
from layerzero.torch_ops.lowering import CAUSAL

__all__ = ["OPEN", "chosen", "decided", "prepare", "spelled", "write", "write_attention"]

comptime: Any = None  # torch._dynamo.comptime.comptime, once Dynamo is there


def _function(path: str) -> Callable[..., Any]:
    # By name: backends live on a floor above, which nothing below may import.
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


# Functions of kernels that Dynamo can follow, under the names by which the kernels are registered: a kernel that is
# registered with another function is another kernel, whatever its id.
_OWN = (
    "torch_native.kernels:rms_norm", "torch_native.kernels:add_rms_norm", "torch_native.kernels:layer_norm",
    "torch_native.kernels:silu_and_mul", "torch_native.kernels:gelu_and_mul", "torch_native.kernels:relu_and_mul",
    "torch_native.kernels:linear", "torch_native.kernels:embedding", "torch_native.feed_forward:mlp",
    "torch_native.norm:gemma_rms_norm", "torch_native.norm:gemma_add_rms_norm", "torch_native.loss:cross_entropy",
    "torch_native.conversion:cast", "torch_native.moe:topk_gate",
    "sdpa.kernels:flash_cpu", "sdpa.kernels:math",
    "reference.attention:attention", "reference.norm:rms_norm", "reference.norm:add_rms_norm",
    "reference.norm:layer_norm", "reference.norm:gemma_rms_norm", "reference.norm:gemma_add_rms_norm",
    "reference.mlp:silu_and_mul", "reference.mlp:gelu_and_mul", "reference.mlp:relu_and_mul",
    "reference.linear:linear", "reference.linear:embedding", "reference.feed_forward:mlp", "reference.moe:topk_gate",
    "reference.loss:cross_entropy", "reference.conversion:cast",
)  # fmt: skip
# Those that it cannot follow (complex numbers, results written into parts of a tensor, programs compiled before) but
# that compute what the op's plain form does: that stands for them.
_PLAIN = (
    "torch_native.rotary:rope_halves", "torch_native.rotary:rope_complex", "reference.positional:rope",
    "reference.positional:xpos",
    *(f"inductor.kernels:{name}" for name in (
        "rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul", "relu_and_mul", "rope",
    )),
)  # fmt: skip
_ROOM = "layerzero.backends."
OPEN: dict[str, Callable[..., Any] | None] = {
    **{_ROOM + path: _function(_ROOM + path) for path in _OWN},
    **dict.fromkeys(_ROOM + path for path in _PLAIN),
    **attention_forms.CUDA,
}


def decided(decision: Decision, world: World) -> Decision:
    """What a decision for an eager call is inside a graph; its notes say what stands there."""
    return basis.compiled(decision, world, OPEN)


# Device types that know autocast; torch.amp.is_autocast_available breaks the graphs of older Dynamos.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")

_here = threading.local()


# -- traced by Dynamo ------------------------------------------------------------------------------
def chosen(op: str, args: tuple[Any, ...], layout: str | None, backend: str | None, grad: bool) -> str:
    """What shall stand in the graph for this call: a name of `OPEN`, "plain", or "" for the opaque op."""
    if torch.compiler._is_exporting_flag:
        return ""  # a program that is saved selects where it runs
    comptime(_ask)
    return _told()


def spelled() -> str:
    """The string of the attention that `chosen` was last asked about (`sites`); "" where it has none."""
    return _told_call()


def write(own: str, form: Callable[..., Any], args: tuple[Any, ...], casts: bool) -> Any:
    """The kernel's own function on canonical arguments, or the op's plain form; `casts` under autocast, as the op."""
    found = _write(own, form, args, casts)
    comptime(_tidy)
    return found


def _write(own: str, form: Callable[..., Any], args: tuple[Any, ...], casts: bool) -> Any:
    kind = args[0].device.type
    if own == "plain":
        if casts and kind in _AUTOCAST and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            args = tuple(_narrowed(item, dtype) for item in args)
        return form(*args)
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        if casts:
            dtype = torch.get_autocast_dtype(kind)
            args = tuple(_narrowed(item, dtype) for item in args)
        with torch.autocast(kind, enabled=False):
            return OPEN[own](*args)  # type: ignore[misc] # those without a function of their own are "plain"
    return OPEN[own](*args)  # type: ignore[misc]


def _narrowed(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != torch.float64:
        return item.to(dtype)
    return item


def write_attention(own: str, args: tuple[Any, ...]) -> Any:
    """Attention by one kernel, on canonical arguments in any layout and rank; `own` names one of `FORMS`."""
    found = attention_forms.FORMS[own](*args)
    comptime(_tidy)
    return found


# -- run while Dynamo traces -----------------------------------------------------------------------
def _told() -> str:
    """The answer that `_ask` has left: a constant of the graph (see `prepare`), guarded by its basis alone."""
    found: str = _here.answer
    return found


def _told_call() -> str:
    """The string that `_ask` has left: a constant of the graph, which means the same in any World."""
    found: str = _here.call
    return found


def _ask(ctx: Any) -> None:
    """Look at the variables of `chosen`, and leave the answer for `_told`. Never breaks a trace."""
    _tidy(ctx)
    grad = bool(ctx.get_local("grad").as_python_constant())
    _here.answer, _here.call = basis.PLAIN if grad else "", ""
    try:
        graph = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
        question = basis.Question(
            ctx.get_local("op").as_python_constant(),
            tuple(_fake(item) for item in ctx.get_local("args").as_proxy()),
            ctx.get_local("layout").as_python_constant(),
            ctx.get_local("backend").as_python_constant(),
            grad,
        )
        if question.op == "attention":
            _here.call = _spell(question)
        with _real_tensors():
            _here.answer = basis.answer(question, OPEN, lambda: basis.basis_of(graph, OPEN, _guard))
    except _GIVES_UP as error:
        if getattr(error, "code", None) == "DTYPE_MIXED":
            _here.answer = ""  # the opaque op refuses it when it runs, as an eager call does
        basis._log.debug("a call cannot be decided while it is traced", exc_info=True)


def _spell(question: basis.Question) -> str:
    query, key, value, mask, _, causal, scale, window, softcap, slopes, _ = question.args
    word = next(word for word, flag in CAUSAL.items() if flag == causal)
    tensors = (query, key, value, mask, slopes)
    return sites.spelled(tensors, word, scale, question.layout or "BHSD", window, softcap, question.backend)


# Whatever a release of torch names differently: the opaque op is always right.
_GIVES_UP = (AttributeError, KeyError, TypeError, NotImplementedError, ValueError)


def _fake(item: Any) -> Any:
    """The fake tensor or symbol behind a node; constants are themselves."""
    if isinstance(item, torch.fx.Proxy):
        return item.node.meta["example_value"]
    if isinstance(item, (list, tuple)):
        return tuple(_fake(part) for part in item)
    return item


def _real_tensors() -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _guard(found: basis.Basis) -> None:
    """Let Dynamo ask this basis before each run of the graph that is being traced."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    def layerzero_selection(builder: Any, guard: Any) -> None:
        builder.guard_manager.root.add_lambda_guard(found.holds, ["LayerZero selects as it did"], None)

    install_guard(Guard(GlobalStateSource(), layerzero_selection))


# Sources of values in rooms that Dynamo traces for us. Nobody assigns to them, and each guard costs at every run.
_OURS = tuple(f"G['__import_layerzero_dot_{room}" for room in ("torch_ops", "_ops", "backends", "model", "dispatch"))


def _tidy(ctx: Any) -> None:
    """Take out of the graph's guards those on our own modules, which tracing them has left."""
    try:
        output = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
        guards = output.tracing_context.guards_context.dynamo_guards.inner
        for guard in [item for item in guards if item.name.startswith(_OURS)]:
            guards.discard(guard)
    except _GIVES_UP:
        basis._log.debug("guards on our own modules stay", exc_info=True)


def prepare() -> None:
    """Called when Dynamo is told of the ops: nothing here may import it before."""
    global comptime
    from torch._dynamo import assume_constant_result
    from torch._dynamo.comptime import comptime as found

    assume_constant_result(_told)  # type: ignore[no-untyped-call]
    assume_constant_result(_told_call)  # type: ignore[no-untyped-call]
    comptime = found
