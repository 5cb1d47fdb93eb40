"""The one exception of the hub. Its code says which check refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layerzero.errors import LayerZeroError
from layerzero.reasons import ReasonCode


class HubError(LayerZeroError, code="HUB_NOT_ALLOWED"):
    """A hub kernel was refused, or could not be fetched, verified or loaded."""


def refuse(code: ReasonCode | str, value: object = None, limit: object = None, *, detail: str = "") -> HubError:
    """The error for a reason code; `detail` goes behind the code's own words."""
    error = HubError(code=code, value=_short(value), limit=_short(limit))
    if detail:
        error = HubError(f"{error.reasons[0].message} ({detail})", code=code, value=_short(value), limit=_short(limit))
    return error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A disk that is full or may not be written to is a refusal like any other, and not a stack trace."""
    try:
        yield
    except OSError as error:
        raise refuse("HUB_WRITE_FAILED", what, error.strerror or str(error)) from error


def _short(value: object) -> object:
    # What a hostile server or file says goes into messages and logs: bounded, and without control characters.
    if not isinstance(value, str):
        return value
    clean = "".join(c if c.isprintable() and c.isascii() else f"\\u{{{ord(c):x}}}" for c in value[:200])
    return clean if len(value) <= 200 else clean + "…"
