"""The situation of a call: everything a choice may depend on besides machine and sizes, as plain text can hold it.

Apart from dispatch tables, which use it too: a process that only looks measured times up does not load those.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from layerzero.model.context import Context

# Not part of a situation: the machine (the table's own header), sizes (buckets), and values no choice depends on.
_SKIPPED = frozenset({"op", "device", "dims", "notes"})
_FIELDS = tuple(f for f in fields(Context) if f.compare and f.name not in _SKIPPED and not f.name.startswith("_"))
_PLAIN_CALL = Context("attention", dims=(("head_dim", 1),))
_DEFAULTS = tuple((name, getattr(_PLAIN_CALL, name)) for name in sorted(f.name for f in _FIELDS))

Situation = tuple[tuple[str, Any], ...]


_PROPERTIES = attrgetter(*(name for name, _ in _DEFAULTS))
_USUAL = _PROPERTIES(_PLAIN_CALL)


def situation(ctx: Context) -> Situation:
    """Every property of a call that a choice may depend on, beside machine and sizes; defaults left out."""
    found = _PROPERTIES(ctx)
    return tuple(
        (item[0], _plain(value))
        for item, value, usual in zip(_DEFAULTS, found, _USUAL, strict=True)
        if value is not usual and value != usual
    )


def _plain(value: Any) -> Any:
    """A hashable form that JSON can hold."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (frozenset, set)):
        return tuple(sorted(str(item) for item in value))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return tuple((name, _plain(getattr(value, name))) for name in value.__dataclass_fields__)
    return str(value)
