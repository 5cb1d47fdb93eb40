"""The public function of an op that is declared by its formula: its source is written from the op's signature.

It is what `lz.rms_norm` is by hand: the key of a call written out, one look-up, run. Tensors enter the key by their
metadata, numbers by type (and by whether they are finite), words and flags by value. A call that cannot be keyed so
(an object, something that is no tensor) takes the generic way, which says what is wrong with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from layerzero._ops.signature import dispatch
from layerzero.dispatch.hot import aside, autocast_key, before_dispatch
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.model.op import Op
from layerzero.runtime.current import now, scope

__all__ = ["public_form", "source"]

_TEMPLATE = """\
def {name}({declared}):
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    ) and not aside.quiet:
        return seen(OP, {args}, None, backend, functools.partial({name}, {again}))
    try:
        hot_key = {key}
        active = _scope()
        world = now.world if active is None else active.world()
        bound = world.hot.get(hot_key)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return dispatch(OP, {args}, backend=backend)
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run{args}
        except Exception as error:
            return recover(OP, world, hot_key, bound, {args}, None, backend, error)
    return miss(OP, current_world(), hot_key, {args}, None, backend)


def key_of({names}, backend):
    return {key}
"""
_KEY = """(
            "{name}",
            {parts},
            backend,
            _grad_enabled() and ({grad}),
            autocast_key() if _any_autocast() else False,
            _deterministic(),
        )"""
_TENSOR = "type({0}), {0}.shape, {0}.dtype, {0}.is_cpu or ~{0}.get_device(), {0}.is_contiguous() or {0}.stride()"
_KEYS = {
    "tensor": _TENSOR,
    "tensor?": f"None if {{0}} is None else ({_TENSOR})",
    "number": "type({0}) if {0} is None or {0} - {0} == 0 else 'not finite'",
    "flag": "{0}",
    "text": "{0}",
    "object": "_unkeyed({0})",
}


def _unkeyed(item: Any) -> None:
    raise TypeError(f"a {type(item).__name__} has no key here")


def source(op: Op) -> str:
    """The source of the public function."""
    name, kinds = op.op_id, dict(zip(op.arguments, op.input_kinds, strict=True))
    grads = [
        f"{argument}.requires_grad" if kind == "tensor" else f"({argument} is not None and {argument}.requires_grad)"
        for argument, kind in kinds.items()
        if kind.startswith("tensor")
    ]
    key = _KEY.format(
        name=name,
        parts=",\n            ".join(_KEYS[kind].format(argument) for argument, kind in kinds.items()),
        grad=" or ".join(grads) or "False",
    )
    placed = {p.name for p in op.signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
    again = ", ".join(argument if argument in placed else f"{argument}={argument}" for argument in op.arguments)
    names = ", ".join(op.arguments)
    return _TEMPLATE.format(
        name=name,
        declared=op.parameters_written()[0],
        names=names,
        args=f"({names},)",
        again=f"{again}, backend=backend",
        key=key,
    )


def public_form(op: Op) -> Op:
    """The op with the function that users call; one that has it already is returned as it is."""
    if "backend" in op.signature.parameters:
        return op
    parameters = op.signature.parameters
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    space: dict[str, Any] = {
        **_SPACE,
        "__name__": "layerzero.ops",
        "DEFAULTS": op.parameters_written()[1],
    }
    exec(compile(source(op), f"<layerzero.ops.{op.op_id}>", "exec"), space)
    function: Callable[..., Any] = space[op.op_id]
    function.__doc__ = inspect.getdoc(op.function)
    function.__signature__ = op.signature.replace(parameters=(*parameters.values(), backend))  # type: ignore[attr-defined]
    made = space["OP"] = replace(op, function=function)
    return made


_SPACE: dict[str, Any] = {
    "_any_autocast": torch._C._is_any_autocast_enabled,
    "_deterministic": torch._C._get_deterministic_algorithms,
    "_dispatch_modes": torch._C._len_torch_dispatch_stack,
    "_function_modes": torch._C._len_torch_function_stack,
    "_grad_enabled": torch.is_grad_enabled,
    "_scope": scope.get,
    "_unkeyed": _unkeyed,
    **{item.__name__: item for item in (autocast_key, before_dispatch, current_world, dispatch, miss, recover, seen)},
    "aside": aside,
    "forward_ad": forward_ad,
    "functools": functools,
    "now": now,
    "profiler": profiler,
}
