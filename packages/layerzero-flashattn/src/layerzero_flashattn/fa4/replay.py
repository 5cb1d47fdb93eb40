"""Calling a compiled FlashAttention 4 kernel without the 60 µs of Python in front of it.

The library's forward works out tile sizes, scheduling and a compile key of seventy entries at each call, looks its
compiled kernel up and calls it. For one shape of query that work always ends in the same kernel and the same options,
so it is done once and remembered: `record` runs the library's own forward with a compile cache that notes which
compiled kernel was called with what, and `Recorded.run` calls that kernel again on other tensors.

Nothing of the library is changed: its function is run a second time as a copy that sees the noting cache where it
looks for its own. What is noted is trusted only if it is what we expect (one call; query, key, value, out, lse and
scale in front, as given; no tensor among the rest); otherwise every call goes through the library as a whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_IN_FRONT = 6  # query, key, value, out, lse, scale


class Recorded(NamedTuple):
    """A compiled kernel and what it was called with, except for the tensors and the scale."""

    kernel: Callable[..., Any]
    rest: tuple[Any, ...]
    out: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
    lse: tuple[tuple[int, ...], tuple[int, ...]] | None

    def run(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """The kernel on other tensors of the same query shape, head counts and dtypes."""
        # Strides given, torch allocates a third quicker than by shape alone.
        device = query.device
        out = torch.empty_strided(*self.out, dtype=query.dtype, device=device)
        lse = None if self.lse is None else torch.empty_strided(*self.lse, dtype=torch.float32, device=device)
        self.kernel(query, key, value, out, lse, scale, *self.rest)
        return out, lse


class _Notes:
    """A compile cache that passes everything on to the library's own and notes what is called."""

    def __init__(self, cache: MutableMapping[Any, Callable[..., Any]]) -> None:
        self._cache = cache
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Callable[..., Any]) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]

        def noted(*args: Any) -> Any:
            self.calls.append((kernel, args))
            return kernel(*args)

        return noted


def replayable(forward: Callable[..., Any]) -> bool:
    """Whether the library's forward keeps its compiled kernels where we expect them."""
    code = getattr(forward, "__code__", None)
    return isinstance(code, types.CodeType) and forward.__name__ in code.co_names and hasattr(forward, "compile_cache")


def record(
    forward: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, return_lse: bool, **options: Any
) -> tuple[tuple[Tensor, Tensor | None], Recorded | None]:
    """The library's result for a call, and the recording, or None where the call did not go as expected."""
    notes = _Notes(forward.compile_cache)
    stand_in = types.SimpleNamespace(compile_cache=notes)
    again = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, forward.__name__: stand_in},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    again.__kwdefaults__ = forward.__kwdefaults__
    out, lse, *_ = again(query, key, value, softmax_scale=scale, return_lse=return_lse, **options)
    return (out, lse), _trusted(notes, (query, key, value, out, lse), scale)


def _trusted(notes: _Notes, tensors: tuple[Tensor | None, ...], scale: float) -> Recorded | None:
    if len(notes.calls) != 1:
        return None
    kernel, args = notes.calls[0]
    if len(args) < _IN_FRONT or not all(_same(a, b) for a, b in zip(args, tensors, strict=False)):
        return None
    rest = tuple(args[_IN_FRONT:])
    if args[5] != scale or _holds_tensor(rest):
        return None
    out, lse = tensors[3], tensors[4]
    assert out is not None
    return Recorded(kernel, rest, _form(out), None if lse is None else _form(lse))


def _form(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


def _same(given: Any, expected: Tensor | None) -> bool:
    """Whether an argument is this tensor, possibly detached; a copy is not."""
    if expected is None or not isinstance(given, Tensor):
        return given is expected
    return (
        given.data_ptr() == expected.data_ptr()
        and given.shape == expected.shape
        and given.stride() == expected.stride()
        and given.dtype == expected.dtype
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, Tensor)
