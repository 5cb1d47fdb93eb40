"""The JSON form of values: one rule for everything that is shown in a report or sent to another process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

_SCALARS = frozenset({bool, int, float, str, type(None)})


class Plain:
    """A dataclass whose JSON form is its public fields by name but for `_unshown`, each as `plain` writes it."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _unshown: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        names = (name for name in self.__dataclass_fields__ if name[0] != "_" and name not in self._unshown)
        return {name: plain(getattr(self, name)) for name in names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse, by the types of the fields. Raises ValueError, TypeError or KeyError for anything else."""
        kind: Any = cls
        found: Self = reader(kind)(data)
        return found


def plain(value: Any) -> Any:
    """The JSON form of a value: sets sorted, ordered enums by name, what JSON has no form for as text."""
    if type(value) in _SCALARS:
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value.name if isinstance(value, int) else value.value
    if isinstance(value, (frozenset, set)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return str(value)


@functools.cache
def reader(kind: Any) -> Callable[[Any], Any]:
    """What reads a value of this type from its JSON form; other data raises ValueError, TypeError or KeyError.

    A dataclass may lack what has a default; what it has besides its fields is passed over. Pairs may be a mapping.
    """
    outer, parts, made = typing.get_origin(kind), typing.get_args(kind), kind
    if outer is tuple and parts[-1] is not ...:
        each = [reader(part) for part in parts]
        return lambda data: tuple(read(item) for read, item in zip(each, _items(data), strict=True))
    if outer in (tuple, frozenset):
        one = reader(parts[0])
        return lambda data: outer(map(one, _items(data)))
    known = [part for part in parts or (kind,) if part is not type(None)]
    if parts and len(known) == 1:
        some = reader(known[0])
        return lambda data: None if data is None else some(data)
    if dataclasses.is_dataclass(kind):
        inside = field_readers(kind)
        return lambda data: made(**{name: read(data[name]) for name, read in inside.items() if name in data})
    if isinstance(kind, enum.EnumType):
        named: Callable[[Any], Any] = made.__getitem__ if issubclass(kind, int) else made
        return named
    allowed = frozenset((*parts, *known, *((int,) if float in known else ())))

    def scalar(data: Any) -> Any:
        if type(data) not in allowed:
            raise TypeError(f"expected {' or '.join(item.__name__ for item in known)}, got {data!r}"[:200])
        return data

    return scalar


def field_readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """What reads each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {item.name: reader(hints[item.name]) for item in dataclasses.fields(kind) if item.init}


def _items(data: Any) -> Any:
    if not isinstance(data, (list, tuple, Mapping)):
        raise TypeError(f"expected a list, got {data!r}"[:200])
    return data.items() if isinstance(data, Mapping) else data


def digest(value: Any, **how: Any) -> str:
    """The sha256 over the JSON of a value, whatever the order of its keys; `how` is for `json.dumps`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), **how)
    return hashlib.sha256(text.encode()).hexdigest()
