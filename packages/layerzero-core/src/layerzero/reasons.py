"""Typed reason codes: why a kernel, a plugin, a file or an input was accepted, adapted or refused.

A code is a stable string (it goes into JSON, logs and lock files) with a category, a message
template and a hint. A `Reason` is one occurrence: the code plus the offending value and the limit.
The codes and their words are the table in `layerzero.reason_words`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from layerzero.json_form import Plain
from layerzero.reason_words import ReasonCategory, ReasonCode

__all__ = ["Reason", "ReasonCategory", "ReasonCode", "reason"]


@dataclass(frozen=True, slots=True)
class Reason(Plain):
    """One occurrence of a reason code, with the value that caused it and the limit it met."""

    code: ReasonCode
    message: str
    value: str | int | float | bool | None = None
    limit: str | int | float | bool | None = None
    hint: str = ""

    @property
    def category(self) -> ReasonCategory:
        return self.code.category

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, (str, int, float, bool)):
        return str(value) if isinstance(value, enum.Enum) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return ", ".join(str(item) for item in items)
    return str(value)


def reason(code: ReasonCode | str, value: object = None, limit: object = None, *, detail: str = "") -> Reason:
    """Build a Reason; message and hint come from the table, `detail` is appended to the message."""
    return _built(ReasonCode(code), _plain(value), _plain(limit), detail)


@lru_cache(maxsize=4096, typed=True)  # typed: 1 and True are not the same value of a reason
def _built(code: ReasonCode, value: Any, limit: Any, detail: str) -> Reason:
    # The same few reasons come again in every selection, and formatting is most of their price.
    fill = {"value": value, "limit": limit}
    text = code.message.format(**fill)
    return Reason(code, f"{text} ({detail})" if detail else text, value, limit, code.hint.format(**fill))
