"""Kinds made of other kinds: lists, objects with free keys, and records with a closed set of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.registry.kinds import Kind, Where, fail, nearest, type_name

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

    return Kind(
        parse,
        lambda: {"type": "object", "propertyNames": key.schema(), "additionalProperties": item.schema()},
    )


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
    """An object with a closed set of keys: the declarative table that validator and schema are read from."""

    __slots__ = ("_defaults", "_known", "_required", "fields", "title")

    def __init__(self, title: str, fields: tuple[Field, ...]) -> None:
        super().__init__(self._parse, self._schema)
        self.title = title
        self.fields = fields
        self._known = {entry.name: entry for entry in fields}
        self._defaults = {entry.name: entry.default for entry in fields}
        self._required = frozenset(entry.name for entry in fields if entry.required)

    def _parse(self, value: Any, where: Where) -> dict[str, Any]:
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

    def _schema(self) -> dict[str, Any]:
        """An object schema that allows no other key."""
        return {
            "type": "object",
            "title": self.title,
            "additionalProperties": False,
            "required": [entry.name for entry in self.fields if entry.required],
            "properties": {entry.name: entry.kind.schema() | {"description": entry.doc} for entry in self.fields},
        }
