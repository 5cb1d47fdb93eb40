"""Telling Dynamo about LayerZero: what it traces in place of which function, and which rooms it stays out of.

Kernels that are plain torch are written into a traced graph, so that the compiler fuses across them: `chosen` asks,
while Dynamo traces an op, what shall stand in the graph (`basis`); `write` then runs the function that the kernel names
for it (`KernelSpec.traceable`), which Dynamo follows. All other kernels are opaque ops.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

from layerzero.model.op import Op
from layerzero.torch_ops import basis, declared, sites, traced
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.lowering import CAUSAL
from layerzero.torch_ops.opaque import autocast_dtype, narrowed

# Rooms that Dynamo must not look into: their calls break a graph at once instead of after tracing half of the
# selection, and run natively. The traced forms, the reference and the values of `model` are the rooms it may trace; of
# `dispatch` only what adapts the inputs of a kernel that is written out.
_SKIPPED = ("ops", "public", "runtime", "selection", "plugin", "policy", "perfdb", "health", "telemetry",
            "registry", "device.probe", "device.cpu", "device.cuda", "device.memory", "device.signature", "jit",
            "tables", "startup", "isolation", "measurements", "recording")  # fmt: skip
_TRACED = ("dispatch.adapt", "_ops.loss", "_ops.moe")


def register() -> None:
    """Tell Dynamo of every op. Called once, right after `torch._dynamo` was imported."""
    global comptime
    from torch._dynamo import assume_constant_result, trace_rules
    from torch._dynamo.comptime import comptime as found

    if trace_rules.is_polyfilled_callable(functions["attention"]):
        return
    assume_constant_result(_told)  # type: ignore[no-untyped-call]
    comptime = found
    traced.__dict__.update(chosen=chosen, write=write, _chosen=chosen, _write=write)
    for room in _SKIPPED:
        trace_rules.add(f"layerzero.{room}")
    for room in ("dispatch", "_ops"):
        for module in pkgutil.iter_modules(importlib.import_module(f"layerzero.{room}").__path__, f"{room}."):
            if module.name not in _TRACED:
                trace_rules.add(f"layerzero.{module.name}")
    for helper in traced.HELPERS:
        _substitute(helper.__name__, helper)
    for op in functions.ops():
        add(op)
    # What adapts inputs is followed where a traced form calls it; around a kernel that runs, it is never compiled.
    for name in ("layerzero.public.planning", "layerzero.dispatch.adapt"):
        for item in vars(importlib.import_module(name)).values():
            if isinstance(item, FunctionType):
                _run_natively(item.__code__)


def leave_alone(module: str, *codes: CodeType) -> None:
    """Keep Dynamo out of a module of another package; functions whose code is given run natively."""
    from torch._dynamo import trace_rules

    trace_rules.add(module)
    for code in codes:
        _run_natively(code)


def add(op: Op) -> None:
    """Tell Dynamo of an op."""
    from torch._dynamo import trace_rules

    if not trace_rules.is_polyfilled_callable(functions[op.op_id]):
        _substitute(op.op_id, declared.traced_form(op))


def _substitute(name: str, form: Callable[..., Any]) -> None:
    torch.compiler.substitute_in_graph(functions[name])(form)
    _run_natively(functions[name].__code__)
    if name in functions.accelerated:
        torch.compiler.substitute_in_graph(functions.accelerated[name])(form)


def _run_natively(code: CodeType) -> None:
    """Where a graph breaks at one of our calls, nothing below it is compiled: no kernel, no vendor's code."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _run_natively(inner)


comptime: Any = None  # torch._dynamo.comptime.comptime, once Dynamo is there

_here = threading.local()


# -- traced by Dynamo ------------------------------------------------------------------------------
def chosen(op: str, args: tuple[Any, ...], layout: str | None, backend: str | None, grad: bool) -> str:
    """What shall stand in the graph for this call: the name of a form, "plain", or "" for the opaque op."""
    if torch.compiler._is_exporting_flag:
        return ""  # a program that is saved selects where it runs
    comptime(_ask)
    return _told("answer")


def spelled() -> str:
    """The string of the attention that `chosen` was last asked about (`sites`); "" where it has none."""
    return _told("call")


def write(own: str, form: Callable[..., Any], args: tuple[Any, ...], casts: bool) -> Any:
    """The kernel's own function on canonical arguments, or the op's plain form; `casts` under autocast, as the op."""
    device = args[0].device
    dtype = autocast_dtype(device)
    if casts and dtype is not None:
        args = tuple(narrowed(item, dtype) for item in args)
    if own == "plain":
        found = form(*args)
    elif dtype is None:
        found = getattr(traced, own)(*args)
    else:
        with torch.autocast(device.type, enabled=False):
            found = getattr(traced, own)(*args)
    comptime(_tidy)
    return found


def write_attention(own: str, args: tuple[Any, ...]) -> Any:
    """Attention by one kernel, on canonical arguments in any layout and rank; `own` names its form."""
    found = getattr(traced, own)(*args)
    comptime(_tidy)
    return found


# -- run while Dynamo traces -----------------------------------------------------------------------
def _told(what: str) -> str:
    """What `_ask` has left: a constant of the graph (see `register`). The answer is guarded by its basis alone, the
    string of a call means the same in any World."""
    found: str = getattr(_here, what)
    return found


def _ask(ctx: Any) -> None:
    """Look at the variables of `chosen`, and leave the answer for `_told`. Never breaks a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

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
        if question.op == "attention" and len(question.args) == 11:
            query, key, value, mask, _, causal, scale, window, softcap, slopes, _ = question.args
            word = next(word for word, flag in CAUSAL.items() if flag == causal)
            tensors, layout = (query, key, value, mask, slopes), question.layout or "BHSD"
            _here.call = sites.spelled(tensors, word, scale, layout, window, softcap, question.backend)
        with unset_fake_temporarily():
            _here.answer = basis.answer(question, lambda: basis.basis_of(graph, _guard))
    except _GIVES_UP as error:
        if getattr(error, "code", None) == "DTYPE_MIXED":
            _here.answer = ""  # the opaque op refuses it when it runs, as an eager call does
        basis._log.debug("a call cannot be decided while it is traced", exc_info=True)


# Whatever a release of torch names differently: the opaque op is always right.
_GIVES_UP = (AttributeError, KeyError, TypeError, NotImplementedError, ValueError)


def _fake(item: Any) -> Any:
    """The fake tensor or symbol behind a node; constants are themselves."""
    if isinstance(item, torch.fx.Proxy):
        return item.node.meta["example_value"]
    if isinstance(item, (list, tuple)):
        return tuple(_fake(part) for part in item)
    return item


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


def _needless(guard: Any) -> bool:
    """Whether a guard is on our own modules, or says of a patched part what others say as well.

    That two names mean one object is asked in Python, at every run, by a walk from the model down to both. That the
    forward kept on a part is bound to that part, and that parts of one type have the same type, follows from the guards
    on the code of the forward and on the type of each part, which are asked in C++ and stay.
    """
    name = guard.name
    if name.startswith(_OURS):
        return True
    aliases = getattr(getattr(guard.create_fn, "func", None), "__name__", "") == "DUPLICATE_INPUT"
    return aliases and (name.endswith(".forward.__self__") or name.startswith("type("))


def _tidy(ctx: Any) -> None:
    """Take out of the graph's guards those on our own modules, which tracing them has left."""
    try:
        output = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
        guards = output.tracing_context.guards_context.dynamo_guards.inner
        for guard in [item for item in guards if _needless(item)]:
            guards.discard(guard)
    except _GIVES_UP:
        basis._log.debug("guards on our own modules stay", exc_info=True)
