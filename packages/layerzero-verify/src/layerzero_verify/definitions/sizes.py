"""Workloads for a definition that brings none: how many sequences, how long, how many pages; and its constraints.

Constraints such as `len_indptr == batch_size + 1` are worked out without eval: a definition that is not trusted may
still be read, so its expressions are walked here, over numbers, shapes and single elements, and nothing else: no calls
but a few, no attributes but `shape`. What goes beyond that is reported as not checked.
"""

from __future__ import annotations

import ast
import operator
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from layerzero.errors import invalid
from layerzero_verify.definitions.schema import Definition
from layerzero_verify.definitions.trace import InputSource, Workload

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "int": int}
_METHODS = ("item", "max", "min", "sum")


class NotCheckable(Exception):
    """The expression uses something this reader does not know, or a value it does not have."""


def violated(constraints: Iterable[str], values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Which constraints do not hold for these axes and inputs, and which could not be checked."""
    broken, unread = [], []
    for text in constraints:
        try:
            if not _value(ast.parse(text, mode="eval").body, values):
                broken.append(text)
        except NotCheckable as missing:
            unread.append(f"{text} ({missing})")
    return broken, unread


def derive(constraints: Iterable[str], known: Mapping[str, int], wanted: Iterable[str]) -> dict[str, int]:
    """Sizes that follow from `name == expression` once the axes in the expression are known."""
    found = dict(known)
    missing = set(wanted) - set(found)
    pairs = [pair for text in constraints for pair in _equations(text)]
    while True:
        news: dict[str, int] = {}
        for name, expression in pairs:
            if name in missing and name not in found:
                try:
                    value = _value(expression, found)
                except NotCheckable:
                    continue
                if isinstance(value, int) and value >= 0:
                    news[name] = value
        if not news:
            return {name: found[name] for name in missing if name in found}
        found.update(news)


def _equations(text: str) -> list[tuple[str, ast.expr]]:
    body = ast.parse(text, mode="eval").body
    if not (isinstance(body, ast.Compare) and len(body.ops) == 1 and isinstance(body.ops[0], ast.Eq)):
        return []
    left, right = body.left, body.comparators[0]
    return [(side.id, other) for side, other in ((left, right), (right, left)) if isinstance(side, ast.Name)]


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    try:
        return _visit(node, values)
    except (TypeError, ValueError, IndexError, ArithmeticError, RuntimeError, RecursionError) as error:
        raise NotCheckable(str(error) or type(error).__name__) from None


def _visit(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return number
        case ast.Name(id=name):
            if name not in values:
                raise NotCheckable(f"{name} is not known")
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_visit(left, values), _visit(right, values))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_visit(operand, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _visit(operand, values)
        case ast.BoolOp(op=op, values=parts):
            each = [bool(_visit(part, values)) for part in parts]
            return all(each) if isinstance(op, ast.And) else any(each)
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            numbers = [_visit(item, values) for item in (left, *rights)]
            pairs = zip(ops, numbers, numbers[1:], strict=False)
            return all(bool(_COMPARE[type(op)](a, b)) for op, a, b in pairs)
        case ast.Subscript(value=base, slice=index):
            return _visit(base, values)[_visit(index, values)]
        case ast.Attribute(value=base, attr="shape"):
            return tuple(_visit(base, values).shape)
        case ast.Call(func=ast.Attribute(value=base, attr=method), args=[], keywords=[]) if method in _METHODS:
            return getattr(_visit(base, values), method)()
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_visit(item, values) for item in args))
    raise NotCheckable(f"{ast.unparse(node)} is beyond what is read here")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to try: every combination of those that the definition has an axis for."""

    batch: tuple[int, ...]
    seq: tuple[int, ...]
    pages: tuple[int, ...]


SIZES: Mapping[str, Sizes] = {
    "small": Sizes((1, 2), (1, 16), (1, 4)),
    "medium": Sizes((4, 8, 16), (64, 128, 256), (16, 32, 64)),
    "large": Sizes((32, 64), (1024, 4096), (256, 512)),
}
DEFAULT = ("small", "medium")
# (batch, longest sequence): the pairs of a whole run.
RUNNER = ((1, 16), (4, 32), (8, 64), (16, 128))

_BATCH = ("batch_size", "batch", "num_seqs", "len_indptr")
_SEQ = ("seq_len", "total_q", "total_kv", "num_tokens", "M", "max_seq_len", "tokens")
_PAGES = ("num_pages", "num_kv_indices")
# Heads may vary in definitions that do not depend on them, such as rope.
_HEADS = {"num_qo_heads": 8, "num_q_heads": 8, "num_heads": 8, "num_kv_heads": 2, "num_k_heads": 2}


def workloads_for(definition: Definition, sizes: Iterable[str] = DEFAULT, *, seed: int = 0) -> list[Workload]:
    """Workloads of these sizes, each once. Their uuids follow from definition, axes and seed."""
    found: dict[str, Workload] = {}
    for name in sizes:
        if name not in SIZES and name != "runner":
            raise invalid("VALUE_INVALID", name, f"{', '.join(SIZES)} or runner", f"unknown size {name!r}")
        for axes in _all_axes(definition, name):
            made = workload_of(definition, axes, seed=seed)
            found.setdefault(made.uuid, made)
    return list(found.values())


def workload_of(definition: Definition, axes: Mapping[str, int], *, seed: int = 0) -> Workload:
    """A workload of random inputs with these axes."""
    words = " ".join(f"{name}={axes[name]}" for name in sorted(axes))
    made = uuid.uuid5(uuid.NAMESPACE_OID, f"layerzero {definition.name} {words} seed={seed}")
    return Workload(str(made), dict(axes), {name: InputSource() for name in definition.inputs})


def _all_axes(definition: Definition, name: str) -> Iterator[dict[str, int]]:
    paged = "kv_indices" in definition.inputs
    if name == "runner":
        for batch, seq in RUNNER:
            page = definition.const_axes.get("page_size", 1)
            yield axes_for(definition, batch, seq, -(-seq // page))
        return
    chosen, have = SIZES[name], set(definition.var_axes)
    for batch, seq, pages in product(
        chosen.batch if have & set(_BATCH) else chosen.batch[:1],
        chosen.seq if have & set(_SEQ) else chosen.seq[:1],
        chosen.pages if paged or have & set(_PAGES) else chosen.pages[:1],
    ):
        yield axes_for(definition, batch, seq, pages)


def axes_for(definition: Definition, batch: int, seq: int, pages: int) -> dict[str, int]:
    """The variable axes for so many sequences, new tokens and pages of each.

    A cache has some pages that nobody uses. In a paged prefill the new tokens have to fit the pages; in a ragged one
    every sequence has earlier keys besides. An axis nobody here knows is derived from the constraints, else it
    becomes `seq`.
    """
    paged = "kv_indices" in definition.inputs
    room = pages * definition.const_axes.get("page_size", 1)
    queries = batch * (min(seq, room) if paged else seq)
    sizes = {
        **dict.fromkeys(("batch_size", "batch", "num_seqs"), batch),
        "len_indptr": batch + 1,
        "total_q": queries,
        "total_kv": queries + batch * min(seq, 16),
        "num_pages": batch * pages + 3,
        "num_kv_indices": batch * pages,
        "max_seq_len": 2 * seq + 16,
        **_HEADS,
        **dict.fromkeys(("seq_len", "num_tokens", "M", "tokens"), seq),
    }
    found = {axis: sizes[axis] for axis in definition.var_axes if axis in sizes}
    found |= derive(definition.constraints, {**definition.const_axes, **found}, definition.var_axes)
    return {axis: found.get(axis, seq) for axis in definition.var_axes}
