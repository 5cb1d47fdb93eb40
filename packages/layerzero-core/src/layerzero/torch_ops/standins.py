"""What a traced call looks like to selection: fake tensors as meta (or other fake) tensors of known sizes.

A size that a graph leaves open has a hint (the size it was traced with) and a range. Selection is asked with the hint,
and then with other sizes of the range, on tensors that only look so: nothing here compares a symbol, so no guard on
any size comes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Sizes beyond this are not tried: no axis of a model is longer.
_LONGEST = 1 << 20
# What torch can count in a tensor: its bytes are an int64.
_MOST_BYTES = (1 << 63) - 1
# So many combinations of sizes are tried at most.
_TRIALS = 300

Sizes = Mapping[Any, int]


class Unknown(Exception):
    """A size without a hint: data-dependent, known only when the graph runs."""


class Impossible(Exception):
    """Sizes, each in its range, that no tensor can have together: its bytes would not fit into 63 bits."""


def _nodes(args: Sequence[Any]) -> Iterator[Any]:
    """Every symbolic size, stride and number among the arguments."""
    for item in args:
        if isinstance(item, Tensor):
            yield from (part.node for part in (*item.shape, *item.stride()) if isinstance(part, torch.SymInt))
        elif isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield item.node
        elif isinstance(item, (list, tuple)):
            yield from _nodes(item)


def symbols_of(args: Sequence[Any]) -> dict[Any, tuple[int, int, int]]:
    """Each free symbol with its hint and its range. Raises Unknown where one has no hint."""
    found: dict[Any, tuple[int, int, int]] = {}
    for node in _nodes(args):
        env = node.shape_env
        for symbol in env.replace(node.expr).free_symbols:
            if symbol in found:
                continue
            hint = _hint_of(env, symbol)
            known = env.var_to_range.get(symbol)
            low, high = (2, _LONGEST) if known is None else (_bounded(known.lower), _bounded(known.upper))
            found[symbol] = (hint, low, high)
    return found


def _hint_of(env: Any, symbol: Any) -> int:
    # Renamed between releases of torch; the old name warns.
    table = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    if symbol not in table:
        raise Unknown(str(symbol))
    return int(table[symbol])


def _bounded(limit: Any) -> int:
    # A limit may be an infinity of sympy's, which can be compared but is no int.
    return _LONGEST if limit > _LONGEST else max(0, int(limit))


def ends(symbols: Mapping[Any, tuple[int, int, int]]) -> Iterator[Sizes]:
    """The low ends of all ranges together, then each range's high end by itself: all at once no tensor could have."""
    lows = {symbol: low for symbol, (_, low, _) in symbols.items()}
    yield lows
    for symbol, (_, _, high) in symbols.items():
        yield lows | {symbol: high}


def sizes_to_try(symbols: Mapping[Any, tuple[int, int, int]], more: Sequence[int] = ()) -> Iterator[Sizes]:
    """Assignments over the ranges: powers of two, the ends, and `more`; of several symbols in all combinations."""
    each = []
    for hint, low, high in symbols.values():
        wanted = {low, min(high, _LONGEST), hint, *(1 << i for i in range(21)), *more}
        each.append(sorted(value for value in wanted if low <= value <= high))
    while len(each) > 0 and math.prod(map(len, each)) > _TRIALS:
        longest = max(range(len(each)), key=lambda i: len(each[i]))
        if len(each[longest]) <= 3:
            raise Unknown("too many open sizes")
        each[longest] = each[longest][::2] + each[longest][-1:]
    for values in itertools.product(*each):
        yield dict(zip(symbols, values, strict=True))


def stand_ins(args: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """The arguments with meta tensors in place of fake ones, and with numbers in place of symbols."""
    return tuple(_stand_in(item, sizes, True) for item in args)


def placed_stand_ins(args: Sequence[Any], sizes: Sizes) -> tuple[Any, ...]:
    """The same with fake tensors that say where they lie: torch's own checks of a call ask for that."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return tuple(_stand_in(item, sizes, False) for item in args)


def _stand_in(item: Any, sizes: Sizes, meta: bool) -> Any:
    if isinstance(item, Tensor):
        shape = [_number(part, sizes) for part in item.shape]
        strides = [_number(part, sizes) for part in item.stride()]
        if _bytes(shape, strides, item.itemsize) > _MOST_BYTES:
            raise Impossible(f"{shape} with strides {strides}")
        made = torch.empty_strided(shape, strides, dtype=item.dtype, device="meta" if meta else item.device)
        return made.requires_grad_(True) if item.requires_grad else made
    if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(item, sizes)
    if isinstance(item, (list, tuple)):
        return type(item)(_stand_in(part, sizes, meta) for part in item)
    return item


def _bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes a tensor takes, dense or as it is strided, whichever is more: torch computes both."""
    if not all(shape):
        return 0
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return max(spanned, math.prod(shape)) * itemsize


def _number(item: Any, sizes: Sizes) -> Any:
    if not isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return item
    from sympy import Integer  # type: ignore[import-untyped] # here only: where there are symbols, it is loaded

    node = item.node
    expr = node.shape_env.replace(node.expr).xreplace({symbol: Integer(size) for symbol, size in sizes.items()})
    if expr.free_symbols:
        raise Unknown(str(expr))
    make: Callable[[Any], Any] = (
        int if isinstance(item, torch.SymInt) else float if isinstance(item, torch.SymFloat) else bool
    )
    return make(expr)


def placed(args: Sequence[Any]) -> torch.device:
    """The device of the first tensor."""
    found = next((item.device for item in args if isinstance(item, Tensor)), None)
    return torch.device("cpu") if found is None else found


def signature(args: Sequence[Any]) -> str:
    """The shapes and strides with their symbols, as text: equal ones are decided alike."""
    return ";".join(f"{item.shape}{item.stride()}" if isinstance(item, Tensor) else str(item) for item in args)
