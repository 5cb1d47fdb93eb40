"""What every public op has in common: its spec, its function, and how a public call becomes canonical arguments.

The public function of a plugin's op that is declared by its formula is written here, from the op's signature, as
`lz.rms_norm` is by hand: the key of a call written out, one look-up, run; its own names begin with an underscore. A
call that cannot be keyed so (an object, no tensor) takes the generic way, which says what is wrong with it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from layerzero.dispatch import hot, modes
from layerzero.dispatch.hot import aside, before_dispatch, generic_key, key_of, key_source, traced, watched
from layerzero.dispatch.late import current_world, miss, recover, seen
from layerzero.errors import InvalidInputError, UnknownNameError, invalid
from layerzero.model.op import Op, OperationSpec
from layerzero.op_tables import LATE_OPS, OP_TABLES
from layerzero.runtime.current import builtin_ops, now, scope
from layerzero.torch_ops import adopt
from layerzero.torch_ops.functions import functions

_scope = scope.get
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
# The core's ops by name; those that are seldom used are imported when they are looked up.
PUBLIC = builtin_ops
OP_TABLES.append(PUBLIC)


def _declare(**fields: Any) -> Op:
    op = Op(**fields)
    PUBLIC[op.op_id] = op
    if op.op_id in LATE_OPS and "layerzero.dispatch.accel" in sys.modules:
        _accelerate(op)
    return op


# An op of the core, known to the runtime, to explain and to plan from here on; one that comes late with its C form.
declare = cast("type[Op]", _declare)


def _accelerate(op: Op) -> None:
    accelerator = sys.modules["layerzero.dispatch.accel"].accelerator
    if accelerator.native is not None:
        found = accelerator.functions.of_plugin(accelerator.native, op)
        functions.accelerate({} if found is None else {op.op_id: found})


def public_op(name: str) -> Op:
    """An op by name, with the function users call; or an error naming the nearest ones."""
    found = PUBLIC.get(name) or _from_plugin(name)
    if found is None:
        import difflib

        names = sorted({*PUBLIC, *current_world().ops})
        near = difflib.get_close_matches(str(name), names, 3)
        hint, limit = None if near else f"use one of: {', '.join(names)}", ", ".join(near or names)
        raise UnknownNameError(f"unknown op {name!r}", code="OP_UNKNOWN", value=str(name), limit=limit, hint=hint)
    return found


# The ops of plugins: as declared, and with the function that was made for it.
_made: dict[str, tuple[Op, Op]] = {}


def _from_plugin(name: str) -> Op | None:
    declared = current_world().ops.get(name)
    if not isinstance(declared, Op):
        return None
    known = _made.get(name)
    if known is None or known[0] is not declared:
        known = _made[name] = declared, public_form(declared)
        _accelerate(known[1])
        adopt(known[1])  # Dynamo, where it is loaded already, is told of the C form too
    return known[1]


def fx_proxy(args: tuple[Any, ...]) -> Any:
    """The first of these arguments that `torch.fx.symbolic_trace` put in place of a tensor; None without any."""
    fx = sys.modules.get("torch.fx")
    return None if fx is None else next((item for item in args if isinstance(item, fx.Proxy)), None)


def fx_node(proxy: Any, op: Op, named: dict[str, Any]) -> Any:
    """The call as one node of the graph that is being traced; its kernel is selected when the graph runs."""
    parameters = op.signature.parameters.values()
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = {p.name: named[p.name] for p in parameters if p.name not in placed and p.name in named}
    said = {p.name: item for p in parameters if (item := options.get(p.name, p.default)) is not p.default}
    return proxy.tracer.create_proxy("call_function", op.function, tuple(named[name] for name in placed), said)


def dispatch(spec: OperationSpec, args: tuple[Any, ...], layout: str | None = None, backend: str | None = None) -> Any:
    """Hot lookup with the key that follows from the kinds of the op's arguments, or the generic one for odd calls."""
    if (
        _dispatch_modes()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or (_function_modes() and before_dispatch())
    ) and not aside.quiet:  # `hot.watched`, written out
        return seen(spec, args, layout, backend, functools.partial(dispatch, spec, args, layout, backend))
    active = _scope()
    world = now.world if active is None else active.world()
    key: tuple[Any, ...] | None
    try:
        key = key_of(spec)(*args, layout, backend)
        bound = world.hot.get(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        try:
            key = generic_key(spec.op_id, args, layout, backend)
            bound = world.hot.get(key) if key is not None else None
        except (RuntimeError, TypeError):  # a nested or sparse tensor has no strides; an option that cannot be hashed
            key = bound = None
    if key is None and (proxy := fx_proxy(args)) is not None:
        named = dict(zip(spec.arguments, args, strict=False)) | {"layout": layout, "backend": backend}
        return fx_node(proxy, public_op(spec.op_id), named)
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run(*args)
        except Exception as error:
            return recover(spec, world, bound, args, layout, backend, error)
    return miss(spec, current_world(), key, args, layout, backend)


Key = Callable[[Any, tuple[Any, ...], str | None], Any]


def keyed(op: Op, key_of: Key, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """Hot lookup with a key of the op's own: `key_of(world, args, backend)`, None for a call without one."""
    if watched() or traced():
        return seen(op, args, layout, backend, functools.partial(looked_up, op, key_of, args, layout, backend))
    return looked_up(op, key_of, args, layout, backend)


def looked_up(op: Op, key_of: Key, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """The kernel that is hot for this call, or the cold path."""
    world = current_world()
    try:
        key = key_of(world, args, backend)
        bound = world.hot.get(key) if key is not None else None
    except InvalidInputError:
        raise
    except (RuntimeError, TypeError, AttributeError):  # a nested tensor, an unhashable option, what is no tensor
        key = bound = None
    if bound is not None and (bound.guard is None or bound.guard()):
        try:
            return bound.run(*args)
        except Exception as error:
            return recover(op, world, bound, args, layout, backend, error)
    return miss(op, world, key, args, layout, backend)


def expect_below(ids: Tensor, name: str, limit: int, *, but: int | None = None, code: str = "VALUE_INVALID") -> None:
    """Refuse indices outside 0 … limit - 1, `but` excepted, where looking at them costs no wait: on the CPU.

    A call is described when it is cold, and again when a kernel raised; so a bad index that only a hot call meets
    still ends here, as one clear error.
    """
    if not ids.is_cpu or ids.numel() == 0 or not modes.plain((ids,)):
        return
    wrong = (ids < 0) | (ids >= limit)
    if but is not None:
        wrong &= ids != but
    if wrong.any():
        found = int(ids[wrong][0])
        raise invalid(code, f"{name} {found}", limit - 1, f"{name} hold {found}, outside 0 to {limit - 1}")


_TEMPLATE = """\
def {name}({declared}):
    if (
        _dispatch_modes()
        or _forward_ad._current_level >= 0
        or _profiler._is_profiler_enabled
        or (_function_modes() and _before_dispatch())
    ) and not _aside.quiet:
        return _seen(_OP, {args}, None, backend, _functools.partial(_again, {again}))
    try:
        _key = {key}
        _active = _scope()
        _world = _now.world if _active is None else _active.world()
        _bound = _world.hot.get(_key)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return _dispatch(_OP, {args}, backend=backend)
    if _bound is not None and (_bound.guard is None or _bound.guard()):
        try:
            return _bound.run{args}
        except Exception as _error:
            return _recover(_OP, _world, _bound, {args}, None, backend, _error)
    return _miss(_OP, _current_world(), _key, {args}, None, backend)

"""


def _source(op: Op) -> str:
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
    space = {**vars(hot), **_SPACE, "__name__": "layerzero.ops", "DEFAULTS": op.parameters_written()[1]}
    made: dict[str, Any] = {}  # apart from what the function calls: an op may be named like any of it
    exec(compile(_source(op), f"<layerzero.ops.{op.op_id}>", "exec"), space, made)
    function: Callable[..., Any] = made[op.op_id]
    space["_again"] = function
    function.__doc__ = inspect.getdoc(op.function)
    function.__signature__ = op.signature.replace(parameters=(*parameters.values(), backend))  # type: ignore[attr-defined]
    space["_OP"] = replace(op, function=function)
    return space["_OP"]  # type: ignore[no-any-return]


_SPACE: dict[str, Any] = {f"_{name}": item for name, item in vars().copy().items() if not name.startswith("_")}
_SPACE |= {"_scope": scope.get}
