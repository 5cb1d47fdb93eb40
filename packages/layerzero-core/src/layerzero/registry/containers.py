"""Kinds made of other kinds: lists, objects with free keys, and records with a closed set of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.registry.kinds import Choice, Kind, Text, Where, fail, nearest, type_name

__all__ = ["Either", "Field", "ListOf", "MapOf", "Record", "Tuple"]

_MAX_ITEMS = 4_096
_MAX_KEPT = 512


class ListOf:
    """A list of one kind, without repetitions unless `unique` is off."""

    def __init__(
        self, item: Kind, at_least: int = 0, to: Callable[[list[Any]], Any] = frozenset, unique: bool = True
    ) -> None:
        self.item = item
        self.at_least = at_least
        self.to = to
        self.unique = unique
        # Kernels of one backend name the same dtypes and layouts again and again: lists of texts found right are kept.
        self._right: dict[tuple[Any, ...], Any] | None = {} if isinstance(item, (Choice, Text)) else None

    def parse(self, value: Any, where: Where) -> Any:
        """The items, in the collection `to`."""
        if self._right is None or type(value) is not list:
            return self._parse(value, where)
        key = tuple(value)
        try:
            return self._right[key]
        except (KeyError, TypeError):  # not met yet, or something in it is no text
            found = self._parse(value, where)
        if len(self._right) < _MAX_KEPT:
            self._right[key] = found
        return found

    def _parse(self, value: Any, where: Where) -> Any:
        if not isinstance(value, (list, tuple)):
            raise fail(where, f"expected a list, got {type_name(value)}", value=value)
        if not self.at_least <= len(value) <= _MAX_ITEMS:
            raise fail(
                where,
                f"expected at least {self.at_least} items, got {len(value)}",
                value=len(value),
                limit=self.at_least,
            )
        parse = self.item.parse
        items = [parse(entry, (where, index)) for index, entry in enumerate(value)]
        if self.unique and len(set(items)) < len(items):
            index = next(i for i, entry in enumerate(items) if entry in items[:i])
            raise fail((where, index), f"{value[index]!r} stands there twice", value=str(value[index]))
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

    def parse(self, value: Any, where: Where) -> tuple[Any, ...]:
        """A tuple of exactly that length."""
        if not isinstance(value, (list, tuple)) or len(value) != self.length:
            raise fail(
                where, f"expected a list of {self.length}, got {type_name(value)}", value=value, limit=self.length
            )
        return tuple(self.item.parse(entry, (where, index)) for index, entry in enumerate(value))

    def schema(self) -> dict[str, Any]:
        """An array of fixed length."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.length, "maxItems": self.length}


class MapOf:
    """An object with free keys of one form and values of one kind."""

    def __init__(self, item: Kind, key: Text, at_least: int = 0) -> None:
        self.item = item
        self.key = key
        self.at_least = at_least

    def parse(self, value: Any, where: Where) -> dict[str, Any]:
        """A dict in the given order."""
        if not isinstance(value, Mapping):
            raise fail(where, f"expected an object, got {type_name(value)}", value=value)
        if not self.at_least <= len(value) <= _MAX_ITEMS:
            raise fail(where, f"expected at least {self.at_least} entries, got {len(value)}", limit=self.at_least)
        return {self.key.parse(name, where): self.item.parse(entry, (where, name)) for name, entry in value.items()}

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

    def parse(self, value: Any, where: Where) -> Any:
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
        self._known = {entry.name: entry for entry in fields}
        self._defaults = {entry.name: entry.default for entry in fields}
        self._required = frozenset(entry.name for entry in fields if entry.required)

    def parse(self, value: Any, where: Where) -> dict[str, Any]:
        """Every declared key, defaults filled in. A missing or unknown key is an error that names it."""
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
                raise fail(
                    (where, str(name)[:80]),
                    "unknown field" if near else f"unknown field; known: {', '.join(known)}",
                    code="SCHEMA_FIELD_UNKNOWN",
                    value=str(name),
                    limit=near,
                    hint=None if near else "remove it",
                )
        for name, entry in known.items():
            if name in value:
                found[name] = entry.kind.parse(value[name], (where, name))
            elif entry.required:
                raise fail((where, name), f"missing; {entry.doc}", code="SCHEMA_FIELD_MISSING", value=name)
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
