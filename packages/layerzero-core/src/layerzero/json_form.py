"""The JSON form of values: one rule for everything that is shown in a report or sent to another process."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

_SCALARS = frozenset({bool, int, float, str, type(None)})


class Plain:
    """A dataclass whose JSON form is its public fields by name but for `_unshown`, each as `plain` writes it."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _unshown: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        names = (name for name in self.__dataclass_fields__ if name[0] != "_" and name not in self._unshown)
        return {name: plain(getattr(self, name)) for name in names}


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


def digest(value: Any, **how: Any) -> str:
    """The sha256 over the JSON of a value, whatever the order of its keys; `how` is for `json.dumps`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), **how)
    return hashlib.sha256(text.encode()).hexdigest()
