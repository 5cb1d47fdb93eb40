"""The tables of the database and what each column means."""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from typing import Any

from layerzero.perfdb.measurement import Measurement, Platform, Surroundings

__all__ = ["COLUMNS", "VERSION", "create", "from_row", "to_row"]

VERSION = 1

_TEXT = {"op", "bucket", "kernel_id", "kernel_version", "backend_version", "mode", "device", "family", "driver",
         "runtime", "torch"}  # fmt: skip
_NAMES = [
    name
    for item in fields(Measurement)
    for name in (
        [part.name for part in fields(Platform)] if item.name == "platform"
        else [part.name for part in fields(Surroundings)] if item.name == "surroundings"
        else [item.name]
    )
]  # fmt: skip
COLUMNS = ("key", "place", *_NAMES, "crc")


def create(connection: sqlite3.Connection) -> None:
    """Make the tables where they are missing."""
    kinds = {name: "TEXT NOT NULL" if name in _TEXT else "REAL" for name in _NAMES} | {"samples": "INTEGER NOT NULL"}
    body = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    keys = "key BLOB PRIMARY KEY, place BLOB NOT NULL"
    connection.execute(f"CREATE TABLE IF NOT EXISTS measurements ({keys}, {body}, crc INTEGER NOT NULL)")
    connection.execute("CREATE INDEX IF NOT EXISTS by_place ON measurements (place)")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def to_row(item: Measurement) -> tuple[object, ...]:
    """A row for the columns in COLUMNS."""
    values = tuple(int(value) if isinstance(value, bool) else value for value in item.values())
    return (item.key, item.place, *values, item.checksum())


def from_row(row: tuple[Any, ...]) -> Measurement | None:
    """The measurement in a row; None when the row is not what was written."""
    try:
        values = dict(zip(_NAMES, row[2:-1], strict=True))
        shared = values.pop("shared")
        platform = Platform(*(values.pop(item.name) for item in fields(Platform)))
        around = {item.name: values.pop(item.name) for item in fields(Surroundings) if item.name != "shared"}
        surroundings = Surroundings(**around, shared=None if shared is None else bool(shared))
        found = Measurement(**values, platform=platform, surroundings=surroundings)
        intact = found.checksum() == row[-1] and found.key == row[0] and found.place == row[1]
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return found if intact else None
