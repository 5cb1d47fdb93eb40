"""The public functions that have a C form (`layerzero-accel`), and what it must know of each of them.

One letter a parameter says how it enters the key: T a tensor, O a tensor or None, N a finite number by type, W a word,
flag or dtype by value, F a finite scale that is not keyed, Z zero, Y zero, which kernels are told as None, A None, I
not looked at. Any other value takes the path in Python, which is the truth: what is learnt here is what stands in the
World's hot table under Python's own key. The functions of these ops do nothing but dispatch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from layerzero._ops.bucketed import bucket_ends, bucketed_key
from layerzero._ops.signature import PUBLIC
from layerzero.dispatch.hot import describe_tensor, key_of, mode_key
from layerzero.dispatch.late import recover
from layerzero.errors import from_outside
from layerzero.model.op import Op, OperationSpec
from layerzero.op_tables import LATE_OPS

if TYPE_CHECKING:
    from layerzero.dispatch.bind import Bound
    from layerzero.selection.world import World

_LETTERS = {"tensor": "T", "tensor?": "O", "number": "N", "flag": "W", "text": "W"}


def letters(op: Op) -> str:
    """How each parameter of an op enters the key in C; "" where one of them is no tensor, number, word or flag."""
    if op.keyed or op.canonical is not None or "object" in op.input_kinds:
        return op.keyed
    kinds = dict(zip(op.arguments, op.input_kinds, strict=True))
    return "".join(_LETTERS[kinds.get(name, "text")] for name in op.signature.parameters)


KINDS = {name: found for name in PUBLIC if name not in LATE_OPS and (found := letters(PUBLIC[name]))}

# (bound kernel, ends of the buckets of the KV length where its bucket leads to the same kernel)
Found = tuple["Bound", tuple[int, ...] | None]
Find = Callable[["World", tuple[Any, ...], str | None, str | None], Found | None]


def accelerated(native: Any) -> dict[str, Callable[..., Any]]:
    """The C form of each of these functions, by name."""
    return {name: _function(native, PUBLIC[name], kinds) for name, kinds in KINDS.items()}


def put_in_place(made: dict[str, Callable[..., Any]]) -> None:
    """Let `from layerzero.ops… import` find the C form too; what is registered with the op stays the one in Python."""
    from layerzero import ops  # `import layerzero`, which calls this, has it by now

    for name, function in made.items():
        for module in (ops, sys.modules[PUBLIC[name].function.__module__]):
            setattr(module, name, function)


def of_plugin(native: Any, op: Op) -> Callable[..., Any] | None:
    """The C form of a function that was made for a plugin's op; None where there is none, or no room."""
    found = letters(op)
    try:
        return _function(native, op, found) if found else None
    except (RuntimeError, ValueError):  # 48 functions or 16 parameters at most: the one in Python is the truth anyway
        return None


def _function(native: Any, op: Op, kinds: str) -> Callable[..., Any]:
    given = list(op.signature.parameters.values())
    parameters = tuple(
        (p.name, kind, p.kind is p.POSITIONAL_OR_KEYWORD, *(() if p.default is p.empty else (p.default,)))
        for p, kind in zip(given, kinds, strict=True)
    )
    names = [p.name for p in given]
    name = op.op_id
    shown = inspect.Signature([p.replace(annotation=p.empty) for p in given])
    made: Callable[..., Any] = native.function(
        name,
        "layerzero" if name in PUBLIC else op.function.__module__,  # where it is found by name, by pickle for one
        f"{name}{shown}\n--\n\n{inspect.getdoc(op.function)}",
        parameters,
        tuple(names.index(argument) for argument in op.arguments[: len(op.arguments) - op.trailing]),
        op.function,
        _quietly((_FINDS.get(name) if op is PUBLIC.get(name) else None) or _find(op)),
        _rescue(op),
        name == "attention",
    )
    return made


def _find(spec: OperationSpec) -> Find:
    """What is hot for a call of an op under the key that follows from its arguments."""

    def find(world: World, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Found | None:
        if type(world.hot) is not dict:  # one that counts its calls is read by Python alone
            return None
        bound = world.hot.get(key_of(spec)(*args, layout, backend))
        return None if bound is None else (bound, None)

    return find


def _quietly(find: Find) -> Find:
    """The call is done: what cannot be looked up now is not learnt. Only a handler's exception reaches the caller."""

    def found(world: World, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Found | None:
        try:
            return find(world, args, layout, backend)
        except Exception as error:
            if from_outside(error):
                raise
            return None

    return found


def _rescue(spec: OperationSpec) -> Callable[..., Any]:
    def rescue(error: Exception, *call: Any) -> Any:  # World, bound kernel, arguments, layout and backend
        try:
            raise error  # so that what is raised below says what it was raised for
        except Exception as raised:
            return recover(spec, *call, raised)

    return rescue


def rms_norm_key(x: Any, weight: Any, backend: str | None) -> tuple[Any, ...]:
    """The key `lz.rms_norm` writes out by hand for a call with a weight and a finite eps."""
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return ("rms_norm", *describe_tensor(x), *describe_tensor(weight), backend, True, *mode_key(grad))


def attention_key(args: tuple[Any, ...], layout: str | None, backend: str | None) -> tuple[Any, ...]:
    """The key `lz.attention` writes out by hand, of a call whose mask is a tensor or None."""
    query, key, value, mask, dropout_p, is_causal, _, window, softcap, slopes, return_lse = args
    tensors = [item for item in (query, key, value, mask, slopes) if item is not None]
    return (
        "attention",
        *describe_tensor(query),
        *describe_tensor(key),
        *describe_tensor(value),
        None if mask is None else describe_tensor(mask),
        None if slopes is None else describe_tensor(slopes),
        is_causal is True or (is_causal is not False and (is_causal,)),
        layout,
        window,
        softcap is None,
        dropout_p != 0.0,
        return_lse,
        backend,
        *mode_key(torch.is_grad_enabled() and any(item.requires_grad for item in tensors)),
    )


def _find_rms_norm(world: World, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Found | None:
    x, weight, _ = args
    if weight is None:
        return _find(PUBLIC["rms_norm"])(world, args, layout, backend)
    bound = world.hot.get(rms_norm_key(x, weight, backend)) if type(world.hot) is dict else None
    return None if bound is None else (bound, None)


def _find_attention(world: World, args: tuple[Any, ...], layout: str | None, backend: str | None) -> Found | None:
    """Under the exact key, or under the one with the KV length in its bucket."""
    if type(world.hot) is not dict:
        return None
    key = attention_key(args, layout, backend)
    exact, coarse = world.hot.get(key), bucketed_key(world, key)
    bucket = None if coarse is None else world.hot.get(coarse)
    bound = bucket if exact is None else exact
    if bound is None:
        return None
    return bound, bucket_ends(world) if bucket is bound else None


_FINDS: dict[str, Find] = {"attention": _find_attention, "rms_norm": _find_rms_norm}
