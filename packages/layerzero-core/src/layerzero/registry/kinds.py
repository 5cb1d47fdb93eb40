"""The kinds of values a descriptor may hold; each can parse a value and describe itself as JSON Schema.

One kind is one small object with two methods: `parse(value, where)` returns the value in its
in-memory form or raises `CapabilitiesError` naming the key path `where`; `schema()` returns the JSON
Schema of what `parse` accepts. Because both live on the same object, validator and schema cannot drift
apart. A path is spelled only when something is wrong there (`Where`). Lists and objects are in
`layerzero.registry.containers`. All are plain classes, since making a dozen dataclasses would take a third
of the first call's time budget.
"""

from __future__ import annotations

import difflib
import enum
import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeAlias

from layerzero.errors import CapabilitiesError, LayerZeroError
from layerzero.model.formula import Formula
from layerzero.reasons import ReasonCode

__all__ = [
    "Choice",
    "Expression",
    "Flag",
    "Kind",
    "Number",
    "Text",
    "Where",
    "Whole",
    "body",
    "fail",
    "nearest",
    "spelled",
    "type_name",
]

_MAX_TEXT = 2_000

# A key path: a text, or a path with one more step, a key or an index. Descriptors hold thousands of values, all right
# but for a few in a lifetime, and putting a text together for each took a fifth of the time.
Where: TypeAlias = "str | tuple[Where, str | int]"


class Kind(Protocol):
    """What every kind of value can do."""

    def parse(self, value: Any, where: Where) -> Any:
        """The in-memory form of `value`; raises CapabilitiesError naming `where`."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema (draft 2020-12) of the accepted values."""


def spelled(where: Where) -> str:
    """A key path as people read it: `ops.attention[0].dtypes[1]`."""
    if isinstance(where, str):
        return where
    before, step = spelled(where[0]), where[1]
    if isinstance(step, int):
        return f"{before}[{step}]"
    return f"{before}.{step}" if before else step


def fail(
    where: Where,
    message: str,
    *,
    code: str = "SCHEMA_INVALID",
    value: object = None,
    limit: object = None,
    hint: str | None = None,
) -> CapabilitiesError:
    """The error for one wrong place; to be raised by the caller."""
    shown = value if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__
    if isinstance(shown, str) and len(shown) > 80:
        shown = shown[:77] + "..."
    key = spelled(where)
    return CapabilitiesError(f"{key}: {message}", key=key, code=ReasonCode(code), value=shown, limit=limit, hint=hint)


def body(error: LayerZeroError) -> str:
    """The message of one of our errors without its code and hint, to be said again at another place."""
    return str(error).split(f" [{error.code.value}]")[0]


def nearest(word: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, if any is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else None


def type_name(value: object) -> str:
    """The JSON word for the type of a value."""
    return {dict: "object", list: "array", str: "text", bool: "true/false", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _short(number: float) -> int | float | str:
    # Python refuses to print whole numbers of thousands of digits.
    return number if abs(number) < 1e18 else "a huge number"


class Flag:
    """true or false."""

    def parse(self, value: Any, where: Where) -> bool:
        """A bool, nothing that merely looks like one."""
        if not isinstance(value, bool):
            raise fail(where, f"expected true or false, got {type_name(value)}", value=value)
        return value

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


class Whole:
    """A whole number between two bounds."""

    def __init__(self, low: int = 0, high: int = 2**53) -> None:
        self.low = low
        self.high = high

    def parse(self, value: Any, where: Where) -> int:
        """An int inside the bounds; true is not 1 here."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(where, f"expected a whole number, got {type_name(value)}", value=value)
        if not self.low <= value <= self.high:
            raise fail(where, f"expected {self.low} to {self.high}", value=_short(value), limit=self.high)
        return value

    def schema(self) -> dict[str, Any]:
        """An integer with bounds."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Number:
    """A finite number, at least `low`."""

    def __init__(self, low: float = -math.inf) -> None:
        self.low = low

    def parse(self, value: Any, where: Where) -> float:
        """A finite float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fail(where, f"expected a number, got {type_name(value)}", value=value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < self.low:
            raise fail(where, f"expected a finite number of at least {self.low}", value=_short(value), limit=self.low)
        return number

    def schema(self) -> dict[str, Any]:
        """A number, bounded below where a bound is set."""
        return {"type": "number"} if self.low == -math.inf else {"type": "number", "minimum": self.low}


class Text:
    """A text, optionally of a fixed form; `check` may refuse it with a ValueError."""

    def __init__(
        self,
        pattern: str | None = None,
        expected: str = "a text",
        check: Callable[[str], Any] | None = None,
        empty: bool = False,
    ) -> None:
        self.pattern = pattern
        self.expected = expected
        self.check = check
        self.empty = empty

    @functools.cached_property
    def _search(self) -> Callable[[str], object]:
        return re.compile(self.pattern or "").search  # where it is first used: most programs meet few of the forms

    def parse(self, value: Any, where: Where) -> str:
        """The text itself."""
        if not isinstance(value, str):
            raise fail(where, f"expected {self.expected}, got {type_name(value)}", value=value)
        if len(value) > _MAX_TEXT or (not value and not self.empty):
            raise fail(where, f"expected {self.expected} of 1 to {_MAX_TEXT} characters", value=value, limit=_MAX_TEXT)
        if self.pattern is not None and not self._search(value):
            raise fail(where, f"expected {self.expected}, got {value[:60]!r}", value=value, limit=self.expected)
        if self.check is not None:
            try:
                self.check(value)
            except ValueError as error:
                raise fail(where, f"expected {self.expected}: {error}", value=value, limit=self.expected) from None
        return value

    def schema(self) -> dict[str, Any]:
        """A string; the check behind it is named in the description."""
        found: dict[str, Any] = {"type": "string", "maxLength": _MAX_TEXT}
        if not self.empty:
            found["minLength"] = 1
        if self.pattern is not None:
            found["pattern"] = self.pattern
        return found


class Choice:
    """One word of an enum, or of a closed set of words."""

    def __init__(self, words: type[enum.Enum] | frozenset[str], by_name: bool = False) -> None:
        self.words = words
        self.by_name = by_name

    @functools.cached_property
    def _known(self) -> dict[str, Any]:
        if isinstance(self.words, frozenset):
            return {word: word for word in sorted(self.words)}
        return {(member.name if self.by_name else str(member.value)): member for member in self.words}

    def parse(self, value: Any, where: Where) -> Any:
        """The enum member (or the word)."""
        known = self._known
        if not isinstance(value, str) or value not in known:
            near = nearest(value, known) if isinstance(value, str) else None
            shown = repr(value[:60]) if isinstance(value, str) else type_name(value)
            hint = f", did you mean {near!r}?" if near else ""
            raise fail(where, f"{shown} is none of {', '.join(known)}{hint}", value=value, limit=", ".join(known))
        return known[value]

    def schema(self) -> dict[str, Any]:
        """An enum of strings."""
        return {"enum": list(self._known)}


@functools.lru_cache(maxsize=256)  # kernels of one library ask for the same workspace
def _formula(text: str) -> Formula:
    return Formula(text)


class Expression:
    """An arithmetic formula over context sizes."""

    def parse(self, value: Any, where: Where) -> Formula:
        """A checked Formula; a plain whole number is a formula too."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53:
            return _formula(str(value))
        if not isinstance(value, str):
            raise fail(where, f"expected a formula such as 'batch * num_heads', got {type_name(value)}", value=value)
        try:
            return _formula(value)
        except CapabilitiesError as error:
            raise fail(where, body(error), value=value) from None

    def schema(self) -> dict[str, Any]:
        """A string or a whole number."""
        return {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 400}, {"type": "integer", "minimum": 0}]}
