"""Arguments and results of a kernel as data, with a schema of our own.

A tensor travels as {"t": [arena, offset, bytes, dtype, shape, strides]}; its bytes lie in that arena. Everything else
is a tagged value: floats as hexadecimal text, so that every bit and every infinity arrives, tuples told from lists,
torch dtypes by name. What has no form here (a generator, an object of another library) is refused before anything
is sent.

`pack` and `unpack` know nothing of processes: they take the function that places a tensor, or finds one again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_ITEMS = 65_536
MAX_DEPTH = 16
MAX_RANK = 16
_BIG = 2**62


class Unsendable(TypeError):
    """A value without a form on the channel."""


class Malformed(ValueError):
    """A description that cannot be true: it came from the other side and is not believed."""


class Placed(NamedTuple):
    """Where a tensor lies and how to see it."""

    arena: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_json(self) -> list[Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.arena, self.offset, self.nbytes, dtype, list(self.shape), list(self.strides)]


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a value, however deep in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors_in(item)]
    return []


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last that a strided view touches."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def pack(value: Any, place: Callable[[Tensor], Placed], depth: int = 0) -> Any:
    """The JSON form of a value; `place` puts a tensor's bytes into an arena."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        return {"t": place(value).to_json()}
    if isinstance(value, int):
        if not -_BIG < value < _BIG:
            raise Unsendable(f"the number {value}")
        return int(value)
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, torch.dtype):
        return {"d": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        if depth >= MAX_DEPTH or len(value) > MAX_ITEMS:
            raise Unsendable(f"a {type(value).__name__} of {len(value)} items at depth {depth}")
        items = [pack(item, place, depth + 1) for item in value]
        return {"u": items} if isinstance(value, tuple) else {"l": items}
    raise Unsendable(type(value).__name__)


def unpack(data: Any, find: Callable[[Placed], Tensor], depth: int = 0) -> Any:
    """The value of a JSON form. Raises Malformed for anything `pack` would not have written."""
    if data is None or isinstance(data, (bool, str)) or type(data) is int:
        return data
    if not isinstance(data, dict) or len(data) != 1 or depth > MAX_DEPTH:
        raise Malformed(f"not a value: {str(data)[:80]}")
    ((tag, inner),) = data.items()
    if tag == "t":
        return find(_placed(inner))
    if tag == "f" and isinstance(inner, str):
        return _float(inner)
    if tag == "d" and isinstance(inner, str):
        return _dtype(inner)
    if tag in ("u", "l") and isinstance(inner, list) and len(inner) <= MAX_ITEMS:
        items = [unpack(item, find, depth + 1) for item in inner]
        return tuple(items) if tag == "u" else items
    raise Malformed(f"not a value: {str(data)[:80]}")


def _float(text: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise Malformed(f"not a number: {text[:80]!r}") from None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise Malformed(f"not a dtype: {name[:80]!r}")
    return found


def _placed(inner: Any) -> Placed:
    """A place whose numbers agree with each other; whether it lies inside its arena is for the arena to say."""
    if not isinstance(inner, list) or len(inner) != 6:
        raise Malformed(f"not a tensor: {str(inner)[:80]}")
    arena, offset, nbytes, name, shape, strides = inner
    if not (isinstance(arena, str) and isinstance(name, str) and isinstance(shape, list) and isinstance(strides, list)):
        raise Malformed(f"not a tensor: {str(inner)[:80]}")
    numbers = [offset, nbytes, *shape, *strides]
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        raise Malformed(f"shape {shape} with strides {strides}")
    if not all(type(item) is int and 0 <= item < _BIG for item in numbers):
        raise Malformed(f"not sizes: {str(numbers)[:120]}")
    dtype = _dtype(name)
    if math.prod(shape) and span(tuple(shape), tuple(strides)) * dtype.itemsize > nbytes:
        raise Malformed(f"shape {shape} with strides {strides} does not fit into {nbytes} bytes")
    return Placed(arena, offset, nbytes, dtype, tuple(shape), tuple(strides))
