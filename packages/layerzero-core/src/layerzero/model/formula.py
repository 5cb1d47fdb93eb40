"""Small arithmetic formulas over context dimensions, as written in capabilities.json.

`Formula("batch * num_heads * ceil(seq_len_q / 128) * 4")` is parsed once into a checked expression;
only numbers, names, + - * / // %, parentheses and min, max, ceil are allowed, so a descriptor can
never run code.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from layerzero.errors import CapabilitiesError

_MAX_LENGTH = 400
_VERY_MUCH = 2**62
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil}
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _evaluate(node: ast.expr, lookup: Callable[[str], float]) -> float:
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]  # `_check` has let in numbers alone
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left, lookup), _evaluate(node.right, lookup))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return _FUNCTIONS[node.func.id](*(_evaluate(arg, lookup) for arg in node.args))


def _check(node: ast.AST, text: str) -> None:
    allowed = (ast.BinOp, ast.Constant, ast.Name, ast.Call, ast.Load, *_BINARY)
    for part in ast.walk(node):
        bad = not isinstance(part, allowed)
        if isinstance(part, ast.Constant):
            bad = type(part.value) not in (int, float) or (type(part.value) is float and not math.isfinite(part.value))
        elif isinstance(part, ast.Call):
            name = part.func.id if isinstance(part.func, ast.Name) else ""
            bad = name not in _FUNCTIONS or bool(part.keywords) or (len(part.args) == 1) is not (name == "ceil")
            bad = bad or not part.args
        if bad:
            raise CapabilitiesError(f"formula {text!r}: {type(part).__name__} is not allowed", value=text)


@dataclass(frozen=True, slots=True)
class Formula:
    """A checked arithmetic expression; call it with a lookup from name to number."""

    text: str
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_LENGTH:
            raise CapabilitiesError(value=f"formula {self.text[:40]} … of over {_MAX_LENGTH} characters")
        try:
            tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CapabilitiesError(f"formula {self.text!r} cannot be parsed", value=self.text) from error
        _check(tree, self.text)
        object.__setattr__(self, "_tree", tree)

    def __str__(self) -> str:
        return self.text

    def names(self) -> frozenset[str]:
        found = {part.id for part in ast.walk(self._tree) if isinstance(part, ast.Name)}
        return frozenset(found - _FUNCTIONS.keys())

    def __call__(self, lookup: Callable[[str], float]) -> int:
        """The value, rounded up to a whole number; division by zero counts as 0, what no float can hold as a lot."""
        try:
            return math.ceil(_evaluate(self._tree, lookup))
        except ZeroDivisionError:
            return 0
        except (OverflowError, ValueError):  # infinite, or infinities against each other
            return _VERY_MUCH
