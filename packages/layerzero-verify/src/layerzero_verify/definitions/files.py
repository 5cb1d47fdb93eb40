"""Reading the dataset's JSON and JSONL files strictly: nothing in them is believed before it is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from layerzero.errors import ConfigurationError

_MAX_BYTES = 16 * 1024 * 1024
MISSING: Any = object()

Value = TypeVar("Value")


def read_text(path: Path) -> str:
    """The file as UTF-8 text; a missing, unreadable, huge or binary file is refused with its name."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigurationError(
                f"{path} is too large", code="CONFIG_FILE_TOO_LARGE", value=f"{size} bytes", limit=_MAX_BYTES
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise at(str(path), f"cannot be read: {error}") from None


def parse_json(text: str, where: str) -> Any:
    """JSON without duplicate keys and without NaN; every refusal names the place."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise at(where, f"is not JSON: {reason}") from None


def json_lines(path: Path) -> Iterator[tuple[int, Any | ConfigurationError]]:
    """Each non-empty line of a JSONL file with its number; a bad line comes out as its error, the rest is read."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line, f"{path.name}, line {number}")
        except ConfigurationError as error:
            yield number, error


def at(where: str, problem: str, *, value: object = None, limit: object = None) -> ConfigurationError:
    """The error for a file that says something impossible."""
    return ConfigurationError(
        f"{where}: {problem}",
        code="SCHEMA_INVALID",
        value=value if value is not None else where,
        limit=limit,
        hint=None if limit is None else f"expected {limit}",
    )


def take(data: Any, name: str, kind: type[Value] | tuple[type, ...], where: str, default: Any = MISSING) -> Value:
    """One field of a JSON object, of the kind expected. A bool is no number, as everywhere in JSON."""
    if not isinstance(data, Mapping):
        raise at(where, f"expected an object, got {type(data).__name__}")
    if name not in data or (data[name] is None and default is not MISSING):
        if default is MISSING:
            raise ConfigurationError(
                f"{where}: {name} is missing", code="SCHEMA_FIELD_MISSING", value=f"{where}: {name}"
            )
        return default  # type: ignore[no-any-return]
    found = data[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join(item.__name__ for item in kinds)
        raise at(f"{where}: {name}", f"expected {wanted}, got {type(found).__name__}", limit=wanted)
    return found  # type: ignore[return-value]


def take_map(data: Any, name: str, where: str) -> dict[str, Any]:
    """A field that is an object with non-empty names."""
    found = take(data, name, dict, where)
    if any(not key for key in found):
        raise at(f"{where}: {name}", "holds an empty name")
    return dict(found)


def take_name(data: Any, name: str, where: str) -> str:
    """A field that becomes part of a file name: it must not be able to leave its folder."""
    found = take(data, name, str, where)
    if not found or found[0] == "." or any(sign in found for sign in "/\\\0"):
        raise at(f"{where}: {name}", f"{found!r} cannot be a file name", value=found, limit="a name without slashes")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
