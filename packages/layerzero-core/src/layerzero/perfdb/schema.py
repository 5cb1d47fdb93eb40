"""The tables of the database and what each column means."""

from __future__ import annotations

import sqlite3
from typing import Any

from layerzero.perfdb.measurement import FLAT_NAMES, Measurement, Platform, Surroundings, checksum_of

APPLICATION = int.from_bytes(b"LZpf", "big")
"""SQLite's application_id, in the first hundred bytes of the file."""
VERSION = 2
"""1: without `threads`. 2: with it; 0 for the rows of 1, whose keys and checksums stay what they were."""

_TEXT = {"op", "bucket", "kernel_id", "kernel_version", "backend_version", "mode", "device", "family", "driver",
         "runtime", "torch"}  # fmt: skip
_NAMES = [name.rpartition(".")[2] for name in FLAT_NAMES]
_THREADS = "INTEGER NOT NULL DEFAULT 0"
COLUMNS = ("key", "place", *_NAMES, "crc")
_SHARED = _NAMES.index("shared")
_PLATFORM = slice(_NAMES.index("device"), _NAMES.index("device") + len(Platform._fields))
_AROUND = slice(_NAMES.index("temperature_c"), _NAMES.index("temperature_c") + len(Surroundings._fields))


def create(connection: sqlite3.Connection) -> None:
    """Make the tables where they are missing."""
    kinds = {name: "TEXT NOT NULL" if name in _TEXT else "REAL" for name in _NAMES} | {
        "samples": "INTEGER NOT NULL",
        "threads": _THREADS,
    }
    body = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    keys = "key BLOB PRIMARY KEY, place BLOB NOT NULL"
    connection.execute(f"CREATE TABLE IF NOT EXISTS measurements ({keys}, {body}, crc INTEGER NOT NULL)")
    connection.execute("CREATE INDEX IF NOT EXISTS by_place ON measurements (place)")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def is_ours(start: bytes) -> bool:
    """Whether a file that begins so was written here, though it may be damaged now: of five marks two are enough."""
    marks = (b"SQLite format 3\0", APPLICATION.to_bytes(4, "big"), b"measurements", b"by_place", b"kernel_version")
    return sum(mark in start for mark in marks) > 1


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database of version 1 to this one, inside a transaction: one more column, and no row is touched."""
    names = {row[1] for row in connection.execute("PRAGMA table_info(measurements)")}
    if "threads" not in names:
        connection.execute(f"ALTER TABLE measurements ADD COLUMN threads {_THREADS}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def as_before(connection: sqlite3.Connection) -> None:
    """Read a database of version 1 that cannot be written: a view of this connection stands before its table."""
    connection.execute("CREATE TEMP VIEW measurements AS SELECT rowid AS rowid, *, 0 AS threads FROM main.measurements")


def to_row(item: Measurement) -> tuple[object, ...]:
    """A row for the columns in COLUMNS."""
    values = tuple(int(value) if isinstance(value, bool) else value for value in item.values())
    return (item.key, item.place, *values, item.checksum())


def from_row(row: tuple[Any, ...]) -> Measurement | None:
    """The measurement in a row; None when the row is not what was written."""
    try:
        values = list(row[2:-1])
        shared = values[_SHARED]
        if shared is not None:
            values[_SHARED] = bool(shared)
        # The checksum first: what is not what was written is not looked at any further.
        if len(values) != len(_NAMES) or checksum_of(values) != row[-1]:
            return None
        platform = Platform(*values[_PLATFORM])
        surroundings = Surroundings(*values[_AROUND])
        first, last = values[: _PLATFORM.start], values[_PLATFORM.stop : _AROUND.start]
        found = Measurement(*(*first, platform, *last, surroundings, *values[_AROUND.stop :]))
        intact = found.key == row[0] and found.place == row[1]
    except (TypeError, ValueError, OverflowError, RecursionError, IndexError):
        return None
    return found if intact else None
