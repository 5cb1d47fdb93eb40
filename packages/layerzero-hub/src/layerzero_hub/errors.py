"""The one exception of the hub. Its code says which check refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layerzero.errors import LayerZeroError
from layerzero.reasons import ReasonCode, reason


class HubError(LayerZeroError, code="HUB_NOT_ALLOWED"):
    """A hub kernel was refused, or could not be fetched, verified or loaded."""


def refuse(code: ReasonCode | str, value: object = None, limit: object = None, *, detail: str = "") -> HubError:
    """The error for a reason code; `detail` goes behind the code's own words."""
    why = reason(code, _short(value), _short(limit))
    return HubError(f"{why.message} ({detail})" if detail else "", reasons=(why,))


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
