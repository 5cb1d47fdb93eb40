"""Kinds of value a setting may have: described once for code, policy files, environment variables and editors."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

Place = tuple[str | int, ...]
_OFF: Final = ("0", "false", "no", "off")
_KERNEL_ID: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2,}")


class Problem(NamedTuple):
    """What is expected at a place, and what stands there.

    `known` are the keys there are, when the key itself is wrong; `allowed` the values, where they are few.
    """

    place: Place
    expected: str
    value: object
    known: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """In words, without the place."""
        if ", got " in self.expected:
            return self.expected
        return f"expected {self.expected}, got {reprlib.repr(self.value)}"


class Kind(NamedTuple):
    """One kind of value.

    schema   JSON Schema of the value in a policy file
    wrong    what is expected instead of a value; None when it is right, its parts aside
    parse    reads a variable's text; a ValueError says what is expected
    parts    name, kind (None: no such key) and value of what is inside
    short    spells out a short form that files may use: one pattern for a list of one
    keys     the keys there may be, where they are known
    """

    schema: dict[str, Any]
    wrong: Callable[[Any], str | None]
    parse: Callable[[str], Any] = str
    parts: Callable[[Any], Iterable[tuple[Any, Kind | None, Any]]] | None = None
    short: Callable[[Any], Any] = lambda value: value
    keys: tuple[str, ...] = ()

    def problems(self, value: Any, place: Place = (), *, written: bool = False) -> Iterator[Problem]:
        """Everything that is wrong with a value, part by part; `written` in a file, where short forms are right."""
        given, value = value, self.short(value) if written else value
        if expected := self.wrong(value):
            yield Problem(place, expected, value, allowed=tuple(map(str, self.schema.get("enum", ()))))
            return
        for name, kind, item in self.parts(value) if self.parts else ():
            if kind is not None:
                alone = isinstance(value, list) and value is not given
                yield from kind.problems(item, place if alone else (*place, name), written=written)
            else:
                yield Problem((*place, name), f"only {', '.join(self.keys)}, not {name}", value, self.keys)

    def spelled_out(self, value: Any) -> Any:
        """A value of a file that is right, short forms of all its parts replaced."""
        value = self.short(value)
        if self.parts is None:
            return value
        parts = ((name, item if kind is None else kind.spelled_out(item)) for name, kind, item in self.parts(value))
        return dict(parts) if isinstance(value, dict) else [item for _, item in parts] if _many(value) else value


def _many(value: object) -> bool:
    return isinstance(value, (list, tuple))


def spell(place: Place) -> str:
    """`rules[0].match.op`."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text.encode("utf-8", "backslashreplace").decode()  # half a character cannot be printed


# -- single values --------------------------------------------------------------------------------------------------
def _flag(text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "on", *_OFF):
        raise ValueError("1, true, yes, on, 0, false, no or off")
    return text.lower() not in _OFF


FLAG: Final = Kind({"type": "boolean"}, lambda v: None if isinstance(v, bool) else "a valid boolean", _flag)


def number(
    low: float = -math.inf, most: float = math.inf, *, above: bool = False, whole: bool = False, unit: str = ""
) -> Kind:
    """A finite number from `low` (or `above` it) to `most`; `unit` is shown."""
    limit = "" if low == -math.inf else f" above {low:g}" if above else f", {low:g} or more"
    expected = f"a {'whole ' if whole else '' if limit else 'finite '}number{unit and f' of {unit}'}{limit}"

    def wrong(value: Any) -> str | None:
        number = not isinstance(value, bool) and isinstance(value, int if whole else (int, float))
        if not number or not -math.inf < value < math.inf:
            return expected
        if value < low or (above and value == low):
            return f"a number greater than {'' if above else 'or equal to '}{low:g}"
        return f"a number less than or equal to {most:g}" if value > most else None

    def parse(text: str) -> float:
        try:
            value = float(text) if not whole else int(text) if re.fullmatch(r"[0-9]{1,18}", text) else math.nan
        except ValueError:
            value = math.nan
        if wrong(value):
            raise ValueError(expected)
        return value

    limits = {"exclusiveMinimum" if above else "minimum": low, "maximum": most}
    finite = {name: limit for name, limit in limits.items() if math.isfinite(limit)}
    return Kind(
        {"type": "integer" if whole else "number", **finite},
        wrong,
        parse,
        short=lambda v: float(v) if not whole and not wrong(v) else v,
    )


def words(*allowed: str | int) -> Kind:
    """One of a few values."""
    told = " or ".join(", ".join(map(repr, allowed)).rsplit(", ", 1))

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(" or ".join(map(str, allowed)))
        return text

    return Kind(
        {"enum": list(allowed)}, lambda v: told if isinstance(v, (bool, float)) or v not in allowed else None, parse
    )


def text(expected: str, right: Callable[[str], object], parse: Callable[[str], str] | None = None) -> Kind:
    """A text for which `right` holds."""

    def wrong(value: Any) -> str | None:
        return "a valid string" if not isinstance(value, str) else None if right(value) else expected

    def checked(given: str) -> str:
        if not right(given):
            raise ValueError(expected)
        return given

    return Kind({"type": "string"}, wrong, parse or checked)


def maybe(kind: Kind) -> Kind:
    """A value of the kind, or nothing."""
    schema = {"anyOf": [kind.schema, {"type": "null"}]}
    return Kind(schema, lambda v: None if v is None else kind.wrong(v), kind.parse, kind.parts, kind.short)


# -- values with parts ----------------------------------------------------------------------------------------------
def _is_mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "a valid dictionary"


def items(item: Kind, parse: Callable[[str], Any] | None = None, *, alone: bool = True) -> Kind:
    """A list; in a file a text `alone` is a list of one, in a variable they are parted by commas or blanks."""
    many = {"type": "array", "items": item.schema}
    return Kind(
        {"anyOf": [item.schema, many]} if alone else many,
        lambda v: None if _many(v) else "a valid list",
        parse or (lambda given: tuple(dict.fromkeys(word for word in re.split(r"[,\s]+", given) if word))),
        lambda v: ((index, item, entry) for index, entry in enumerate(v or ())),
        lambda v: [v] if alone and isinstance(v, str) else v,
    )


def pairs(key: Kind, value: Kind) -> Kind:
    """A mapping from texts of one kind to values of another."""

    def parts(given: Mapping[str, Any]) -> Iterator[tuple[str, Kind, Any]]:
        for name, item in given.items():
            yield name, key, name
            yield name, value, item

    return Kind({"type": "object", "additionalProperties": value.schema}, _is_mapping, parts=parts)


def table(doc: str, keys: Mapping[str, tuple[Kind, Any, str]]) -> Kind:
    """A mapping with known keys: name → kind, default, description."""
    properties = {
        name: {**kind.schema, "description": told, "default": list(default) if isinstance(default, tuple) else default}
        for name, (kind, default, told) in keys.items()
    }
    schema = {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}
    return Kind(
        schema,
        _is_mapping,
        parts=lambda v: ((name, keys.get(name, (None,))[0], item) for name, item in v.items()),
        keys=tuple(keys),
    )


def either(one: Kind, other: Kind) -> Kind:
    """A text of one kind, or a value of another."""
    return Kind(
        {"anyOf": [one.schema, other.schema]},
        lambda v: (one if isinstance(v, str) else other).wrong(v),
        one.parse,
        lambda v: () if isinstance(v, str) or other.parts is None else other.parts(v),
        keys=other.keys,
    )


def is_kernel_id(name: str) -> bool:
    """Whether a text reads backend.op.variant."""
    return _KERNEL_ID.fullmatch(name) is not None


def _folders(given: str) -> tuple[str, ...]:
    found = tuple(os.path.expanduser(part.strip()) for part in given.split(os.pathsep) if part.strip())
    if not all(map(os.path.isabs, found)):  # a relative one would mean another place in each directory
        raise ValueError(f"absolute paths separated by {os.pathsep}")
    return found


def _inside_json(value: Any) -> Iterator[tuple[Any, Kind, Any]]:
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value) if _many(value) else ():
        if isinstance(value, Mapping):
            yield name, TEXT, name
        yield name, JSON, item


_JSON_TYPES: Final = (str, int, float, bool, type(None), Mapping, list, tuple)
JSON: Final = Kind({}, lambda v: None if isinstance(v, _JSON_TYPES) else "a valid JSON value", parts=_inside_json)
TEXT: Final = text("a text", lambda given: True)
PATTERN: Final = text("a glob over kernel ids or backend names", lambda given: given and given == given.strip())
PATTERNS: Final = items(PATTERN)
KERNEL: Final = text("a kernel id such as sdpa.attention.flash", is_kernel_id)
PATH: Final = text("a path", bool, os.path.expanduser)
FOLDERS: Final = items(text("an absolute path", os.path.isabs), _folders, alone=False)
EXPRESSIONS: Final = items(TEXT, lambda given: () if given.lower() in _OFF else tuple(given.split()))
