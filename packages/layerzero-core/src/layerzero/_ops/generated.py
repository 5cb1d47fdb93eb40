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

from layerzero._ops.signature import dispatch
from layerzero.dispatch import hot
from layerzero.dispatch.hot import key_source
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.model.op import Op
from layerzero.runtime.current import now, scope

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
            return recover(OP, world, bound, {args}, None, backend, error)
    return miss(OP, current_world(), hot_key, {args}, None, backend)

"""


def source(op: Op) -> str:
    """The source of the public function."""
    name, kinds = op.op_id, dict(zip(op.arguments, op.input_kinds, strict=True))
    placed = {p.name for p in op.signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
    again = ", ".join(argument if argument in placed else f"{argument}={argument}" for argument in op.arguments)
    names = ", ".join(op.arguments)
    return _TEMPLATE.format(
        name=name,
        declared=op.parameters_written()[0],
        args=f"({names},)",
        again=f"{again}, backend=backend",
        key=key_source(name, kinds, "None"),
    )


def public_form(op: Op) -> Op:
    """The op with the function that users call; one that has it already is returned as it is."""
    if "backend" in op.signature.parameters:
        return op
    parameters = op.signature.parameters
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    space: dict[str, Any] = {
        **vars(hot),
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
    "_scope": scope.get,
    **{item.__name__: item for item in (current_world, dispatch, miss, recover, seen)},
    "functools": functools,
    "now": now,
}
