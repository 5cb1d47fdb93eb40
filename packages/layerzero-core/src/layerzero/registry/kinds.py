"""The kinds of values a descriptor may hold; each can parse a value and describe itself as JSON Schema.

One kind is one small object with two methods: `parse(value, where)` returns the value in its
in-memory form or raises `CapabilitiesError` naming the key path `where`; `schema()` returns the JSON
Schema of what `parse` accepts. Because both live on the same object, validator and schema cannot
drift apart. They are plain classes, since making a dozen dataclasses would take a third of the first call's
time budget.
"""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from layerzero.errors import CapabilitiesError, LayerZeroError
from layerzero.model.formula import Formula
from layerzero.reasons import ReasonCode

__all__ = [
    "Choice", "Either", "Expression", "Field", "Flag", "Kind", "ListOf", "MapOf", "Number", "Record", "Text", "Tuple",
    "Whole", "body", "fail", "nearest",
]  # fmt: skip

_MAX_TEXT = 2_000
_MAX_ITEMS = 4_096


class Kind(Protocol):
    """What every kind of value can do."""

    def parse(self, value: Any, where: str) -> Any:
        """The in-memory form of `value`; raises CapabilitiesError naming `where`."""

    def schema(self) -> dict[str, Any]:
        """JSON Schema (draft 2020-12) of the accepted values."""


def fail(
    where: str,
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
    return CapabilitiesError(
        f"{where}: {message}", key=where, code=ReasonCode(code), value=shown, limit=limit, hint=hint
    )


def body(error: LayerZeroError) -> str:
    """The message of one of our errors without its code and hint, to be said again at another place."""
    return str(error).split(f" [{error.code.value}]")[0]


def nearest(word: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, if any is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return found[0] if found else None


def _type_name(value: object) -> str:
    return {dict: "object", list: "array", str: "text", bool: "true/false", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _short(number: float) -> int | float | str:
    # Python refuses to print whole numbers of thousands of digits.
    return number if abs(number) < 1e18 else "a huge number"


class Flag:
    """true or false."""

    def parse(self, value: Any, where: str) -> bool:
        """A bool, nothing that merely looks like one."""
        if not isinstance(value, bool):
            raise fail(where, f"expected true or false, got {_type_name(value)}", value=value)
        return value

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


class Whole:
    """A whole number between two bounds."""

    def __init__(self, low: int = 0, high: int = 2**53) -> None:
        self.low = low
        self.high = high

    def parse(self, value: Any, where: str) -> int:
        """An int inside the bounds; true is not 1 here."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(where, f"expected a whole number, got {_type_name(value)}", value=value)
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

    def parse(self, value: Any, where: str) -> float:
        """A finite float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fail(where, f"expected a number, got {_type_name(value)}", value=value)
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

    def parse(self, value: Any, where: str) -> str:
        """The text itself."""
        if not isinstance(value, str):
            raise fail(where, f"expected {self.expected}, got {_type_name(value)}", value=value)
        if len(value) > _MAX_TEXT or (not value and not self.empty):
            raise fail(where, f"expected {self.expected} of 1 to {_MAX_TEXT} characters", value=value, limit=_MAX_TEXT)
        if self.pattern is not None and not re.search(self.pattern, value):
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

    def _known(self) -> dict[str, Any]:
        if isinstance(self.words, frozenset):
            return {word: word for word in sorted(self.words)}
        return {(member.name if self.by_name else str(member.value)): member for member in self.words}

    def parse(self, value: Any, where: str) -> Any:
        """The enum member (or the word)."""
        known = self._known()
        if not isinstance(value, str) or value not in known:
            near = nearest(value, known) if isinstance(value, str) else None
            shown = repr(value[:60]) if isinstance(value, str) else _type_name(value)
            hint = f", did you mean {near!r}?" if near else ""
            raise fail(where, f"{shown} is none of {', '.join(known)}{hint}", value=value, limit=", ".join(known))
        return known[value]

    def schema(self) -> dict[str, Any]:
        """An enum of strings."""
        return {"enum": list(self._known())}


class Expression:
    """An arithmetic formula over context sizes."""

    def parse(self, value: Any, where: str) -> Formula:
        """A checked Formula; a plain whole number is a formula too."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53:
            return Formula(str(value))
        if not isinstance(value, str):
            raise fail(where, f"expected a formula such as 'batch * num_heads', got {_type_name(value)}", value=value)
        try:
            return Formula(value)
        except CapabilitiesError as error:
            raise fail(where, body(error), value=value) from None

    def schema(self) -> dict[str, Any]:
        """A string or a whole number."""
        return {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 400}, {"type": "integer", "minimum": 0}]}


class ListOf:
    """A list of one kind, without repetitions unless `unique` is off."""

    def __init__(
        self, item: Kind, at_least: int = 0, to: Callable[[list[Any]], Any] = frozenset, unique: bool = True
    ) -> None:
        self.item = item
        self.at_least = at_least
        self.to = to
        self.unique = unique

    def parse(self, value: Any, where: str) -> Any:
        """The items, in the collection `to`."""
        if not isinstance(value, (list, tuple)):
            raise fail(where, f"expected a list, got {_type_name(value)}", value=value)
        if not self.at_least <= len(value) <= _MAX_ITEMS:
            raise fail(
                where,
                f"expected at least {self.at_least} items, got {len(value)}",
                value=len(value),
                limit=self.at_least,
            )
        items = [self.item.parse(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        if self.unique and len(set(items)) < len(items):
            index = next(i for i, entry in enumerate(items) if entry in items[:i])
            raise fail(f"{where}[{index}]", f"{value[index]!r} stands there twice", value=str(value[index]))
        return self.to(items)

    def schema(self) -> dict[str, Any]:
        """An array of unique items."""
        found = {"type": "array", "items": self.item.schema(), "uniqueItems": self.unique, "maxItems": _MAX_ITEMS}
        return found | {"minItems": self.at_least} if self.at_least else found


class Tuple:
    """A list of fixed length."""

    def __init__(self, item: Kind, length: int) -> None:
        self.item = item
        self.length = length

    def parse(self, value: Any, where: str) -> tuple[Any, ...]:
        """A tuple of exactly that length."""
        if not isinstance(value, (list, tuple)) or len(value) != self.length:
            raise fail(
                where, f"expected a list of {self.length}, got {_type_name(value)}", value=value, limit=self.length
            )
        return tuple(self.item.parse(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    def schema(self) -> dict[str, Any]:
        """An array of fixed length."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.length, "maxItems": self.length}


class MapOf:
    """An object with free keys of one form and values of one kind."""

    def __init__(self, item: Kind, key: Text, at_least: int = 0) -> None:
        self.item = item
        self.key = key
        self.at_least = at_least

    def parse(self, value: Any, where: str) -> dict[str, Any]:
        """A dict in the given order."""
        if not isinstance(value, Mapping):
            raise fail(where, f"expected an object, got {_type_name(value)}", value=value)
        if not self.at_least <= len(value) <= _MAX_ITEMS:
            raise fail(where, f"expected at least {self.at_least} entries, got {len(value)}", limit=self.at_least)
        return {self.key.parse(name, where): self.item.parse(entry, f"{where}.{name}") for name, entry in value.items()}

    def schema(self) -> dict[str, Any]:
        """An object whose keys have a form."""
        found = {"type": "object", "propertyNames": self.key.schema(), "additionalProperties": self.item.schema()}
        return found | {"minProperties": self.at_least} if self.at_least else found


class Either:
    """One of two kinds; `first` is tried when `picks(value)` says so."""

    def __init__(self, picks: Callable[[Any], bool], first: Kind, second: Kind) -> None:
        self.picks = picks
        self.first = first
        self.second = second

    def parse(self, value: Any, where: str) -> Any:
        """What the picked kind makes of it."""
        return (self.first if self.picks(value) else self.second).parse(value, where)

    def schema(self) -> dict[str, Any]:
        """Any of the two."""
        return {"anyOf": [self.first.schema(), self.second.schema()]}


class Field:
    """One key of a record: its kind, what it means, and whether it must be there."""

    def __init__(self, name: str, kind: Kind, doc: str, required: bool = False, default: Any = None) -> None:
        self.name = name
        self.kind = kind
        self.doc = doc
        self.required = required
        self.default = default


class Record:
    """An object with a closed set of keys: the declarative table that validator and schema are read from."""

    def __init__(self, title: str, fields: tuple[Field, ...]) -> None:
        self.title = title
        self.fields = fields

    def parse(self, value: Any, where: str) -> dict[str, Any]:
        """Every declared key, defaults filled in. A missing or unknown key is an error that names it."""
        if not isinstance(value, Mapping):
            raise fail(where or self.title, f"expected an object, got {_type_name(value)}", value=value)
        known = {entry.name: entry for entry in self.fields}
        for name in value:
            if not isinstance(name, str) or name not in known:
                near = nearest(str(name), known)
                raise fail(
                    _join(where, str(name)[:80]),
                    "unknown field" if near else f"unknown field; known: {', '.join(known)}",
                    code="SCHEMA_FIELD_UNKNOWN",
                    value=str(name),
                    limit=near,
                    hint=None if near else "remove it",
                )
        found = {}
        for name, entry in known.items():
            if name in value:
                found[name] = entry.kind.parse(value[name], _join(where, name))
            elif entry.required:
                raise fail(_join(where, name), f"missing; {entry.doc}", code="SCHEMA_FIELD_MISSING", value=name)
            else:
                found[name] = entry.default
        return found

    def schema(self) -> dict[str, Any]:
        """An object schema that allows no other key."""
        return {
            "type": "object",
            "title": self.title,
            "additionalProperties": False,
            "required": [entry.name for entry in self.fields if entry.required],
            "properties": {entry.name: entry.kind.schema() | {"description": entry.doc} for entry in self.fields},
        }


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
