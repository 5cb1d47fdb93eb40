"""What people do to keep a database in order: check it, and remove what is of no use."""

from __future__ import annotations

import time

from layerzero.perfdb.measurement import Platform
from layerzero.perfdb.store import PerfDB

__all__ = ["prune", "verify"]


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
