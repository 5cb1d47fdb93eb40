"""One pass over a model of diffusers: each part replaced or left, with the reason."""

from __future__ import annotations

import copy
import functools
import sys
import types
from typing import Any

import torch.nn.functional
from torch import nn

from layerzero import attention
from layerzero_models.diffusers.dispatcher import backend
from layerzero_models.diffusers.parts import feed_forward_of, norm_of
from layerzero_models.diffusers.processors import known
from layerzero_models.record import Changes, Record

_GATE_LAST = "its gate is the second half, so that lz.mlp needs two products; feed_forward=True patches it"


def apply(model: nn.Module, record: Record, *, attention: bool, norms: bool, feed_forward: bool) -> None:
    """Replace what can be replaced, and write down what was done, and what was left and why."""
    changes, ours = record.changes, known()
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if attention and callable(processor):
            word, done = _attention(module, processor, changes, ours)
            (record.did if done else record.leave)(name, processor, word)
        found = norm_of(module) if norms else None
        if isinstance(found, str):
            record.leave(name, module, found)
        elif found is not None:
            changes.set(module, "forward", found[0])
            record.did(name, module, found[1])
        forward = feed_forward_of(module)
        if forward is not None and feed_forward:
            changes.set(module, "forward", forward)
            record.did(name, module, "mlp")
        elif forward is not None:
            record.leave(name, module, _GATE_LAST)


def _attention(module: Any, processor: Any, changes: Changes, ours: dict[type, Any]) -> tuple[str, bool]:
    """The op and True, or why not and False."""
    if getattr(processor, "_parallel_config", None) is not None:
        return "runs over several devices by the library's own scheme", False
    replacement = ours.get(type(processor))
    if replacement is not None:
        changes.set(module, "processor", replacement)
        return replacement.op, True
    if hasattr(processor, "_attention_backend"):
        changes.set(processor, "_attention_backend", backend())
        return "attention", True
    borrowed = borrow(processor)
    if borrowed is not None:
        changes.set(module, "processor", borrowed)
        return "attention", True
    if isinstance(processor, nn.Module):
        return "the processor has weights of its own", False
    return "the processor computes its scores itself", False


_WANTED = "scaled_dot_product_attention"


# Many models have processors of their own that differ in everything around one call of torch's attention function. Such
# a processor's code is kept as it is and gets other globals: the same ones, but for `F`. Neither the library's class
# nor its module is touched.
class _Functional:
    """torch.nn.functional with another attention."""

    scaled_dot_product_attention = staticmethod(attention)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.nn.functional, name)
        setattr(self, name, found)
        return found


_functional = _Functional()


def borrow(processor: Any) -> Any | None:
    """A copy of a processor that attends with LayerZero; None where its code does not call torch's function itself."""
    kind = _over_layerzero(type(processor))  # type: ignore[arg-type] # a class is hashable
    if kind is None:
        return None
    ours = copy.copy(processor)
    ours.__class__ = kind
    return ours


@functools.lru_cache(maxsize=256)
def _over_layerzero(kind: type) -> type | None:
    if issubclass(kind, torch.nn.Module):  # another object in its place would take its weights out of the model
        return None
    call = vars(kind).get("__call__")
    if not isinstance(call, types.FunctionType) or _WANTED not in call.__code__.co_names:
        return None
    names = call.__globals__
    if names.get("F") is not torch.nn.functional or vars(sys.modules[kind.__module__]) is not names:
        return None
    # Without a name torch.compile guards on this very dictionary; with one it would guard on the library's module.
    others = {key: value for key, value in names.items() if key != "__name__"} | {"F": _functional}
    again = types.FunctionType(call.__code__, others, call.__name__, call.__defaults__, call.__closure__)
    again.__kwdefaults__ = call.__kwdefaults__
    again.__annotations__ = call.__annotations__
    again.__qualname__ = call.__qualname__
    body = {"__call__": again, "__module__": __name__, "__doc__": kind.__doc__, "op": "attention"}
    return type(f"LayerZero{kind.__name__}", (kind,), body)
