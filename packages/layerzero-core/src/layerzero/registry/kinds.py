"""The kinds of values a descriptor may hold; each can parse a value and describe itself as JSON Schema.

One kind is a pair of functions: `parse(value, where)` returns the value in its in-memory form or raises
`CapabilitiesError` naming the key path `where`; `schema()` returns the JSON Schema of what `parse` accepts.
Because both are made together, validator and schema cannot drift apart. A path is spelled only when something
is wrong there (`Where`). First single values, then lists, objects with free keys and records with a closed set of keys.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from layerzero import errors, json_form
from layerzero.errors import CapabilitiesError
from layerzero.files import decode_strictly
from layerzero.model.formula import Formula
from layerzero.reasons import ReasonCode

_MAX_TEXT = 2_000

# A key path: a text, or a path with one more step, a key or an index. Descriptors hold thousands of values, all right
# but for a few in a lifetime, and putting a text together for each took a fifth of the time.
Where: TypeAlias = "str | tuple[Where, str | int]"


class Kind:
    """One kind of value: how it is read, and its JSON Schema (draft 2020-12). `texts`: every value of it is a text."""

    __slots__ = ("parse", "schema", "texts")

    def __init__(
        self, parse: Callable[[Any, Where], Any], schema: Callable[[], dict[str, Any]], texts: bool = False
    ) -> None:
        self.parse, self.schema, self.texts = parse, schema, texts


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


def nearest(word: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, if any is near."""
    return next(iter(errors.nearest(word, known, 1, cutoff)), None)


def type_name(value: object) -> str:
    """The JSON word for the type of a value."""
    known = {dict: "object", list: "array", str: "text", bool: "true/false", type(None): "null"}
    return known.get(type(value), type(value).__name__)


def _short(number: float) -> int | float | str:
    # Python refuses to print whole numbers of thousands of digits.
    return number if abs(number) < 1e18 else "a huge number"


def _flag(value: Any, where: Where) -> bool:
    if not isinstance(value, bool):
        raise fail(where, f"expected true or false, got {type_name(value)}", value=value)
    return value


FLAG = Kind(_flag, lambda: {"type": "boolean"})


def whole(low: int = 0, high: int = 2**53) -> Kind:
    """A whole number between two bounds; true is not 1 here."""

    def parse(value: Any, where: Where) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(where, f"expected a whole number, got {type_name(value)}", value=value)
        if not low <= value <= high:
            raise fail(where, f"expected {low} to {high}", value=_short(value), limit=high)
        return value

    return Kind(parse, lambda: {"type": "integer", "minimum": low, "maximum": high})


def number(low: float = -math.inf) -> Kind:
    """A finite number, at least `low`."""

    def parse(value: Any, where: Where) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise fail(where, f"expected a number, got {type_name(value)}", value=value)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or found < low:
            raise fail(where, f"expected a finite number of at least {low}", value=_short(value), limit=low)
        return found

    return Kind(parse, lambda: {"type": "number"} if low == -math.inf else {"type": "number", "minimum": low})


def text(
    pattern: str = "", expected: str = "a text", check: Callable[[str], Any] | None = None, empty: bool = False
) -> Kind:
    """A text, optionally of a fixed form; `check` may refuse it with a ValueError."""

    @functools.cache
    def search() -> Callable[[str], object]:
        return re.compile(pattern).search  # where it is first used: most programs meet few of the forms

    def parse(value: Any, where: Where) -> str:
        if not isinstance(value, str):
            raise fail(where, f"expected {expected}, got {type_name(value)}", value=value)
        if len(value) > _MAX_TEXT or (not value and not empty):
            raise fail(where, f"expected {expected} of 1 to {_MAX_TEXT} characters", value=value, limit=_MAX_TEXT)
        if pattern and not search()(value):
            raise fail(where, f"expected {expected}, got {value[:60]!r}", value=value, limit=expected)
        if check is not None:
            try:
                check(value)
            except ValueError as error:
                raise fail(where, f"expected {expected}: {error}", value=value, limit=expected) from None
        return value

    def schema() -> dict[str, Any]:
        least = {} if empty else {"minLength": 1}
        return {"type": "string", "maxLength": _MAX_TEXT, **least, **({"pattern": pattern} if pattern else {})}

    return Kind(parse, schema, texts=True)


def choice(words: type[enum.Enum] | frozenset[str], by_name: bool = False) -> Kind:
    """One word of an enum, or of a closed set of words."""

    @functools.cache
    def listed() -> dict[str, Any]:
        if isinstance(words, frozenset):
            return {word: word for word in sorted(words)}
        return {(member.name if by_name else str(member.value)): member for member in words}

    def parse(value: Any, where: Where) -> Any:
        known = listed()
        if not isinstance(value, str) or value not in known:
            near = nearest(value, known) if isinstance(value, str) else None
            shown = repr(value[:60]) if isinstance(value, str) else type_name(value)
            hint = f", did you mean {near!r}?" if near else ""
            raise fail(where, f"{shown} is none of {', '.join(known)}{hint}", value=value, limit=", ".join(known))
        return known[value]

    return Kind(parse, lambda: {"enum": list(listed())}, texts=True)


_formula = functools.lru_cache(maxsize=256)(Formula)  # kernels of one library ask for the same workspace


def _expression(value: Any, where: Where) -> Formula:
    """A checked Formula over context sizes; a plain whole number is a formula too."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53:
        return _formula(str(value))
    if not isinstance(value, str):
        raise fail(where, f"expected a formula such as 'batch * num_heads', got {type_name(value)}", value=value)
    try:
        return _formula(value)
    except CapabilitiesError as error:
        raise fail(where, error.body, value=value) from None


EXPRESSION = Kind(
    _expression,
    lambda: {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 400}, {"type": "integer", "minimum": 0}]},
)


# -- from the bytes of a descriptor to plain values, and back to one hash; what the fields mean is not known here
MAX_BYTES = 1 << 20
MAX_DEPTH = 16
_LEAVES = frozenset({str, int, float, bool, type(None)})
_BOM = b"\xef\xbb\xbf"


def read(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file; one that is missing or too large is refused."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise fail("", f"cannot be read: {error.strerror}", code="CONFIG_FILE_MISSING", value=path.name) from None
    if len(data) > most:
        raise fail("", f"larger than {most} bytes", code="CONFIG_FILE_TOO_LARGE", value=path.name, limit=most)
    return data


def decoded(data: bytes) -> Mapping[str, Any]:
    """The object the bytes stand for: plain JSON, no key twice, no NaN."""
    try:
        text = data.removeprefix(_BOM).decode()
        found = decode_strictly(
            text,
            lambda key: fail(key[:80], "the key stands there twice", value=key),
            lambda word: fail("", f"{word} is not a JSON number", value=word),
        )
    except RecursionError:
        raise fail("", f"nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH) from None
    except json.JSONDecodeError as error:
        raise fail(f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}", value=error.msg) from None
    except ValueError as error:  # bad UTF-8, a number with too many digits
        raise fail("", f"not JSON: {error}", value=str(error)) from None
    if not isinstance(found, dict):
        raise fail("", f"expected an object at the top, got {type(found).__name__}", value=type(found).__name__)
    return found


def check_depth(value: Any) -> None:
    """Raise where lists and objects lie deeper in each other than any descriptor needs."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH - 1):
        # Texts and numbers, which most values are, hold nothing deeper.
        level = [item for entry in level for item in _children(entry) if type(item) not in _LEAVES]
        if not level:
            return
    if any(len(_children(entry)) for entry in level):
        raise fail("", f"nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH)


def _children(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def digest(document: Mapping[str, Any]) -> str:
    """A hash of the content, whatever its order and spacing."""
    try:
        return json_form.digest(document)
    except (TypeError, ValueError) as error:
        raise fail("", f"holds a value that JSON has no word for: {error}", value=str(error)) from None


_MAX_ITEMS = 4_096
_MAX_KEPT = 512


def list_of(
    item: Kind,
    at_least: int = 0,
    to: Callable[[list[Any]], Any] = frozenset,
    unique: bool = True,
    most: int = _MAX_ITEMS,
) -> Kind:
    """A list of one kind as a collection `to`, without repetitions unless `unique` is off."""
    # Kernels of one backend name the same dtypes and layouts again and again: lists of texts found right are kept.
    right: dict[tuple[Any, ...], Any] = {}

    def parse(value: Any, where: Where) -> Any:
        if not item.texts or type(value) is not list:
            return parse_anew(value, where)
        key = tuple(value)
        try:
            return right[key]
        except (KeyError, TypeError):  # not met yet, or something in it is no text
            found = parse_anew(value, where)
        if len(right) < _MAX_KEPT:
            right[key] = found
        return found

    def parse_anew(value: Any, where: Where) -> Any:
        if not isinstance(value, (list, tuple)):
            raise fail(where, f"expected a list, got {type_name(value)}", value=value)
        if not at_least <= (count := len(value)) <= most:
            raise fail(where, f"expected {at_least} to {most} items, got {count}", value=count, limit=at_least)
        items = [item.parse(entry, (where, index)) for index, entry in enumerate(value)]
        if unique and len(set(items)) < len(items):
            index = next(i for i, entry in enumerate(items) if entry in items[:i])
            raise fail((where, index), f"{value[index]!r} stands there twice", value=str(value[index]))
        return to(items)

    def schema() -> dict[str, Any]:
        found = {"type": "array", "items": item.schema(), "uniqueItems": unique, "maxItems": most}
        return found | {"minItems": at_least} if at_least else found

    return Kind(parse, schema)


def tuple_of(item: Kind, length: int) -> Kind:
    """A list of fixed length."""

    def parse(value: Any, where: Where) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise fail(where, f"expected a list of {length}, got {type_name(value)}", value=value, limit=length)
        return tuple(item.parse(entry, (where, index)) for index, entry in enumerate(value))

    return Kind(parse, lambda: {"type": "array", "items": item.schema(), "minItems": length, "maxItems": length})


def map_of(item: Kind, key: Kind) -> Kind:
    """An object with free keys of one form and values of one kind, in the given order."""

    def parse(value: Any, where: Where) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise fail(where, f"expected an object, got {type_name(value)}", value=value)
        if len(value) > _MAX_ITEMS:
            raise fail(where, f"expected at most {_MAX_ITEMS} entries, got {len(value)}", limit=_MAX_ITEMS)
        return {key.parse(name, where): item.parse(entry, (where, name)) for name, entry in value.items()}

    return Kind(parse, lambda: {"type": "object", "propertyNames": key.schema(), "additionalProperties": item.schema()})


def either(picks: Callable[[Any], bool], first: Kind, second: Kind) -> Kind:
    """One of two kinds; `first` is tried when `picks(value)` says so."""
    return Kind(
        lambda value, where: (first if picks(value) else second).parse(value, where),
        lambda: {"anyOf": [first.schema(), second.schema()]},
    )


class Field:
    """One key of a record: its kind, what it means, and whether it must be there."""

    def __init__(self, name: str, kind: Kind, doc: str, required: bool = False, default: Any = None) -> None:
        self.name, self.kind, self.doc, self.required, self.default = name, kind, doc, required, default


class Record(Kind):
    """An object with a closed set of keys: the declarative table that validator and schema are read from.

    Every declared key is given, defaults filled in unless it is `sparse`. A missing or unknown key is an error that
    names it.
    """

    __slots__ = ("_defaults", "_known", "_required", "fields", "title")

    def __init__(self, title: str, *fields: Field, sparse: bool = False) -> None:
        super().__init__(self._parse, self._schema)
        self.title = title
        self.fields = fields
        self._known = {entry.name: entry for entry in fields}
        self._defaults = {} if sparse else {entry.name: entry.default for entry in fields}
        self._required = frozenset(entry.name for entry in fields if entry.required)

    def _parse(self, value: Any, where: Where) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise fail(where or self.title, f"expected an object, got {type_name(value)}", value=value)
        known, found = self._known, self._defaults.copy()
        if self._required <= value.keys() <= known.keys():
            try:
                for name, item in value.items():
                    found[name] = known[name].kind.parse(item, (where, name))
                return found
            except CapabilitiesError:
                pass
        # Something is wrong: look again, in the order of the table, which says what of it is reported.
        for name in value:
            if not isinstance(name, str) or name not in known:
                near = nearest(str(name), known)
                text, hint = "unknown field", None
                if near is None:
                    text, hint = f"unknown field; known: {', '.join(known)}", "remove it"
                place = (where, str(name)[:80])
                raise fail(place, text, code="SCHEMA_FIELD_UNKNOWN", value=str(name), limit=near, hint=hint)
        for name, entry in known.items():
            if name in value:
                found[name] = entry.kind.parse(value[name], (where, name))
            elif entry.required:
                raise fail((where, name), f"missing; {entry.doc}", code="SCHEMA_FIELD_MISSING", value=name)
        return found

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "title": self.title,
            "additionalProperties": False,
            "required": [entry.name for entry in self.fields if entry.required],
            "properties": {entry.name: entry.kind.schema() | {"description": entry.doc} for entry in self.fields},
        }
