"""Reading FlashInfer's autotune caches: which tactic of which runner was best for which shapes. Read, never run.

Two forms are in use: a Python module with one dictionary `best_configs`, as shipped in `flashinfer/tuning_configs`, and
a JSON mapping. Keys are the written form of (op, runner, shapes), values (runner number or name, tactic). A cache holds
no times, so it makes no measurements; its tactics are kept as they are, for the device its name or metadata gives.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero.perfdb.store import PerfDB
from layerzero_tune.perfdb.exchange import read_text

_MAX_BYTES = 64 << 20
_DEVICE = re.compile(r"(NVIDIA_[A-Za-z0-9_]+?)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Tactic:
    """One entry: for these shapes this tactic of this runner was the fastest."""

    op: str
    runner: str
    shapes: str
    tactic: str
    device: str = ""
    version: str = ""


_TABLE = (
    f"CREATE TABLE IF NOT EXISTS tactics ({', '.join(f'{item.name} TEXT NOT NULL' for item in fields(Tactic))}, "
    "PRIMARY KEY (op, runner, shapes, device, version))"
)


def put_tactics(db: PerfDB, items: Iterable[Tactic]) -> int:
    """Keep what FlashInfer's own tuner found beside the measurements; a later entry replaces one of the same key."""
    rows = [astuple(item) for item in items]
    with db.writing() as connection:
        connection.execute(_TABLE)
        connection.executemany("INSERT OR REPLACE INTO tactics VALUES (?, ?, ?, ?, ?, ?)", rows)
    return len(rows)


def tactics(db: PerfDB, op: str | None = None, device: str | None = None) -> list[Tactic]:
    """Tactics that were kept, of an op and for a device where these are given."""
    if not db.rows("SELECT 1 FROM sqlite_master WHERE name = 'tactics'"):
        return []
    found = [Tactic(*(str(part) for part in row)) for row in db.rows("SELECT * FROM tactics")]
    return [t for t in found if (op is None or t.op == op) and (device is None or t.device == device)]


def is_autotune_cache(path: Path) -> bool:
    """Whether a file looks like one; our own export does not."""
    if path.suffix == ".py":
        return True
    try:
        head = path.read_text(encoding="utf-8", errors="replace")[:65536]
    except OSError:
        return False
    return path.suffix == ".json" and "\"('" in head and '"measurements"' not in head


def read_autotune_cache(path: Path) -> list[Tactic]:
    """Every entry of a cache. Raises ConfigurationError for a file that is none."""
    text = read_text(path, _MAX_BYTES)
    data = _python(path, text) if path.suffix == ".py" else _json(path, text)
    named = _DEVICE.search(path.name)
    meta = data.get("_metadata") if isinstance(data.get("_metadata"), dict) else {}
    assert isinstance(meta, dict)
    device = str(meta.get("gpu") or meta.get("device") or (named[1].replace("_", " ") if named else ""))
    version = str(meta.get("flashinfer_version") or meta.get("version") or "")
    return list(_entries(path, data, device, version))


def _python(path: Path, text: str) -> dict[Any, Any]:
    """The dictionary a module assigns to `best_configs`, read as a literal: nothing of the file is run."""
    try:
        tree = ast.parse(text)
        for node in tree.body:
            names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign) and "best_configs" in names:
                found = ast.literal_eval(node.value)
                if isinstance(found, dict):
                    return found
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _bad(path, f"no plain dictionary: {error}") from None
    raise _bad(path, "assigns no best_configs")


def _json(path: Path, text: str) -> dict[Any, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _bad(path, f"a {type(found).__name__}, expected a mapping")
    inner = found.get("best_configs") or found.get("configs")
    return {**inner, "_metadata": found.get("_metadata") or found.get("metadata")} if isinstance(inner, dict) else found


def _entries(path: Path, data: dict[Any, Any], device: str, version: str) -> Iterable[Tactic]:
    for key, value in data.items():
        if not isinstance(key, str) or key.startswith("_"):
            continue
        try:
            parts = ast.literal_eval(key)
            op, runner, shapes = str(parts[0]), str(parts[1]), parts[-1]
            if len(parts) < 3 or not isinstance(value, (list, tuple)) or len(value) < 2:
                raise ValueError("expected (op, runner, shapes) and (runner, tactic)")
        except (SyntaxError, ValueError, TypeError, IndexError, RecursionError, MemoryError) as error:
            raise _bad(path, f"the entry {key[:80]!r} cannot be read: {error}") from None
        yield Tactic(op, runner, repr(shapes), repr(value[1]), device, version)


def _bad(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{path.name}: {why}", code="SCHEMA_INVALID", value=why)
