"""What people do with a database: move its measurements, merge several into one, check it and tidy up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.errors import ConfigurationError, InvalidInputError, invalid
from layerzero.files import write_whole
from layerzero.perfdb.measurement import Measurement, Platform, Surroundings
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
    data = read_json(name, _MAX_BYTES)
    if (
        not isinstance(data, dict)
        or data.get("format") not in _READABLE
        or not isinstance(data.get("measurements"), list)
    ):
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigurationError(
            f"{name.name}: not a PerfDB export", code="SCHEMA_VERSION_UNKNOWN", value=str(found), limit=FORMAT
        )
    items = []
    for index, entry in enumerate(data["measurements"]):
        try:
            items.append(from_json(entry))
        except (InvalidInputError, TypeError) as error:
            raise ConfigurationError(
                f"{name.name}: measurements[{index}]: {error}", code="SCHEMA_INVALID", value=f"measurements[{index}]"
            ) from None
    return add_newer(db, items)


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
    """Intact rows, damaged rows, and what SQLite itself finds wrong with the file."""
    intact = [item is not None for _, item in db.scan()]
    problems = [str(row[0]) for row in db.rows("PRAGMA quick_check(20)") if row[0] != "ok"]
    return sum(intact), len(intact) - sum(intact), problems


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
        raise ConfigurationError(
            f"{file.name}: cannot be read: {error}", code="SCHEMA_INVALID", value=str(error)
        ) from None
