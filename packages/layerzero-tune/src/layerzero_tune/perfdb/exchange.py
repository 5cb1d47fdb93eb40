"""What people do with a database: move its measurements, merge several into one, check it, read it and tidy up.

FlashInfer's autotune caches say which tactic of which runner was best for which shapes. Two forms are in use: a Python
module with one dictionary `best_configs`, as shipped in `flashinfer/tuning_configs`, which is read and never run, and a
JSON mapping. Keys are the written form of (op, runner, shapes), values (runner number or name, tactic). A cache holds
no times, so it makes no measurements; its tactics are kept as they are, for the device its name or metadata gives.
"""

from __future__ import annotations

import ast
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError, InvalidInputError, invalid
from layerzero.files import write_whole
from layerzero.perfdb.measurement import GROWING, Measurement, Platform, Surroundings
from layerzero.perfdb.store import PerfDB
from layerzero.recording.traffic import read_json

FORMAT = "layerzero-perfdb/2"
_READABLE = ("layerzero-perfdb/1", FORMAT)  # 1: without the number of threads
_MAX_BYTES = 1 << 30
_NUMBERS = ("median_us", "p95_us", "p99_us", "variance", "measured_at")


def export_json(db: PerfDB, path: str | os.PathLike[str]) -> int:
    """Write every measurement to a file, whole or not at all; equal databases give equal bytes."""
    items = sorted((item.to_json() for item in db.all()), key=lambda data: json.dumps(data, sort_keys=True))
    text = json.dumps({"format": FORMAT, "measurements": items}, indent=1, sort_keys=True)
    write_whole(Path(path), text + "\n")
    return len(items)


def import_json(db: PerfDB, path: str | os.PathLike[str]) -> int:
    """Add the measurements of a file; all of them or, where one is wrong, none. Newer ones in the database stay."""
    name = Path(path)
    items = []
    data = read_json(name, _MAX_BYTES)
    for index, entry in enumerate(entries_of(data, "measurements", _READABLE, name.name, "not a PerfDB export")):
        try:
            items.append(from_json(entry))
        except (InvalidInputError, TypeError) as error:
            where = f"measurements[{index}]"
            raise ConfigurationError(f"{name.name}: {where}: {error}", code="SCHEMA_INVALID", value=where) from None
    return add_newer(db, items)


def entries_of(data: Any, key: str, formats: Sequence[str], source: str, what: str) -> list[Any]:
    """The list under a key of a file in one of our formats, the last of which is today's; else ConfigurationError."""
    if not isinstance(data, dict) or data.get("format") not in formats or not isinstance(data.get(key), list):
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        message = f"{source}: {what}"
        raise ConfigurationError(message, code="SCHEMA_VERSION_UNKNOWN", value=str(found), limit=formats[-1])
    listed: list[Any] = data[key]
    return listed


def from_json(data: dict[str, Any]) -> Measurement:
    """The inverse of `Measurement.to_json`. Raises InvalidInputError naming what is wrong."""
    try:
        given = dict(data)
        given["platform"] = Platform(**given["platform"])
        given["surroundings"] = Surroundings(**given.get("surroundings", {}))
        found = Measurement(**given)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise InvalidInputError(f"not a measurement: {error}", code="SCHEMA_INVALID", value=str(error)) from None
    texts = (found.op, found.bucket, found.kernel_id, found.kernel_version, found.backend_version, found.mode,
             *found.platform[:-1])  # fmt: skip
    if not all(isinstance(text, str) for text in texts) or isinstance(found.samples, bool):
        raise InvalidInputError("a field has a wrong type", code="SCHEMA_INVALID", value="text expected")
    threads = found.platform.threads
    if type(threads) is not int or not 0 <= threads < 1 << 31:
        raise invalid("SCHEMA_INVALID", str(threads), "0 or more", f"platform.threads is {threads!r}")
    numbers: dict[str, Any] = {name: float(getattr(found, name)) for name in _NUMBERS}
    off = None if found.max_error is None else float(found.max_error)
    return replace(found, **numbers, samples=int(found.samples), max_error=off)


def merge(target: PerfDB, sources: Iterable[PerfDB]) -> int:
    """Bring the measurements of other databases in, as `add_newer` does."""
    return sum(add_newer(target, source.all()) for source in sources)


def add_newer(db: PerfDB, items: Iterable[Measurement]) -> int:
    """Keep these measurements; of two with one key the newer stays. Says how many came in."""
    newest: dict[bytes, Measurement] = {item.key: item for item in db.all()}
    coming: dict[bytes, Measurement] = {}
    for item in items:
        held = coming.get(item.key) or newest.get(item.key)
        if held is None or item.measured_at > held.measured_at:
            coming[item.key] = item
    return db.put(coming.values())


def prune(db: PerfDB, *, platform: Platform | None = None, older_than_s: float | None = None) -> int:
    """Remove rows of other platforms than this one, rows past an age, and rows whose checksum is wrong."""
    now, gone = time.time(), []
    for key, item in db.scan():
        # Other numbers of threads are other times of the same machine.
        foreign = item is not None and platform is not None and item.platform[:-1] != platform[:-1]
        old = item is not None and older_than_s is not None and now - item.measured_at > older_than_s
        if item is None or foreign or old:
            gone.append((key,))
    if gone:
        with db.writing() as connection:
            connection.executemany("DELETE FROM measurements WHERE rowid = ?", gone)
    return len(gone)


def verify(db: PerfDB) -> tuple[int, int, list[str]]:
    """Intact rows, damaged rows, and what is wrong with the file: what SQLite finds, and what was met while reading."""
    intact = [item is not None for _, item in db.scan()]
    problems = [str(row[0]) for row in db.rows("PRAGMA quick_check(20)") if row[0] != "ok"]
    return sum(intact), len(intact) - sum(intact), [*problems, *map(str, db.problems)]


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """The text of a file of at most so many bytes. Raises ConfigurationError where it cannot be had."""
    file = Path(path)
    try:
        if file.stat().st_size > most:
            raise ConfigurationError(code="CONFIG_FILE_TOO_LARGE", value=file.name, limit=f"{most} bytes")
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigurationError(code="CONFIG_FILE_MISSING", value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"{file.name}: cannot be read: {error}"
        raise ConfigurationError(message, code="SCHEMA_INVALID", value=str(error)) from None


_GROWING = GROWING | {"elements"}

_SHOWN = ("dtype", "causal", "mask", "window", "quant_format", "layout")


def summarise(item: Measurement) -> str:
    """The bucket of a measurement: its sizes, and what of its situation tells it from its neighbours."""
    try:
        bucket = json.loads(item.bucket)
        return bucket_words(bucket["sizes"].items(), bucket["when"].items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return item.bucket[:80]


def bucket_words(sizes: Iterable[tuple[str, int]], when: Iterable[tuple[str, object]]) -> str:
    """The calls of a bucket in words: sizes, those that grow up to its end, and what is special about them."""
    words = [f"{name}{'≤' if name in _GROWING else '='}{size}" for name, size in sizes]
    return " ".join([*words, *(f"{name}={value}" for name, value in when if name in _SHOWN)])


_MAX_CACHE_BYTES = 64 << 20
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
    text = read_text(path, _MAX_CACHE_BYTES)
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
