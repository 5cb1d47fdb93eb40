"""From the bytes of a descriptor to plain values, and back to one hash; what the fields mean is not known here."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from layerzero.registry.kinds import fail

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
        found = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise fail("", f"nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH) from None
    except json.JSONDecodeError as error:
        raise fail(f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}", value=error.msg) from None
    except ValueError as error:  # bad UTF-8, a number with too many digits
        raise fail("", f"not JSON: {error}", value=str(error)) from None
    if not isinstance(found, dict):
        raise fail("", f"expected an object at the top, got {type(found).__name__}", value=type(found).__name__)
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    raise fail(twice[:80], "the key stands there twice", value=twice)


def _no_constant(text: str) -> Any:
    raise fail("", f"{text} is not a JSON number", value=text)


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
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (TypeError, ValueError) as error:
        raise fail("", f"holds a value that JSON has no word for: {error}", value=str(error)) from None
    return hashlib.sha256(text.encode()).hexdigest()
