"""Constraints such as `len_indptr == batch_size + 1` or `total_q == qo_indptr[-1].item()`, worked out without eval.

A definition that is not trusted may still be read, so its expressions are walked here, over numbers, shapes and single
elements, and nothing else: no calls but a few, no attributes but `shape`. What goes beyond that is reported as not
checked.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
