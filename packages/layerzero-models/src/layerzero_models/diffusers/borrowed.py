"""A processor of the library whose own code runs over LayerZero's attention.

Many models have processors of their own that differ in everything around one call of torch's attention function. Here
such a processor's code is kept as it is and gets other globals: the same ones, but for `F`, whose
`scaled_dot_product_attention` is `lz.attention`. Neither the library's class nor its module is touched.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from typing import Any

import torch.nn.functional

from layerzero import attention

_WANTED = "scaled_dot_product_attention"


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
