"""Telling Dynamo about LayerZero: what it traces in place of which function, and which rooms it stays out of."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

from layerzero.model.op import Op
from layerzero.torch_ops import declared, traced, written
from layerzero.torch_ops.functions import functions

# Rooms that Dynamo must not look into: their calls break a graph at once instead of after tracing half of the
# selection, and run natively. The traced forms, the reference and the values of `model` are the rooms it may trace; of
# `dispatch` only what adapts the inputs of a kernel that is written out.
_SKIPPED = ("ops", "public", "runtime", "selection", "plugin", "policy", "perfdb", "health", "telemetry",
            "registry", "device.probe", "device.cpu", "device.cuda", "device.memory", "device.signature", "jit",
            "tables", "startup", "isolation", "measurements", "recording")  # fmt: skip
_TRACED = ("dispatch.adapt", "_ops.loss", "_ops.moe")


def register() -> None:
    """Tell Dynamo of every op. Called once, right after `torch._dynamo` was imported."""
    from torch._dynamo import trace_rules

    if trace_rules.is_polyfilled_callable(functions["attention"]):
        return
    written.prepare()
    traced.chosen, traced.write = written.chosen, written.write
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
