"""PerfDB: the file, its connections, and what happens when it is damaged.

One connection per thread and process. A row counts only when its checksum fits; a file that SQLite itself calls
damaged is set aside whole, what can be read from it is carried over, and work goes on with a fresh one. No damage of
the file reaches the caller as an exception or as a wrong number. A file that something else has written is neither
moved nor changed, wherever a setting names it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from layerzero.errors import CacheCorruptionError
from layerzero.files import set_aside, user_cache
from layerzero.perfdb.measurement import FLAT_NAMES, Measurement, Platform, Surroundings, checksum_of, place_of
from layerzero.reasons import Reason, reason

Result = TypeVar("Result")

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
    """Whether a file that begins so was written here, though it may be damaged now: our mark, or two of our names."""
    names = (b"measurements", b"by_place", b"kernel_version")
    return start[68:72] == APPLICATION.to_bytes(4, "big") or sum(name in start for name in names) > 1


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a database of version 1 to this one: one more column, no row is touched. What may only be read stays."""
    try:
        with transaction(connection):
            names = {row[1] for row in connection.execute("PRAGMA table_info(measurements)")}
            if "threads" not in names:
                connection.execute(f"ALTER TABLE measurements ADD COLUMN threads {_THREADS}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise
        as_before(connection)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it is on disk afterwards, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        yield


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


_log = logging.getLogger("layerzero.perfdb")

_BUSY_S = 30.0
_WAL_FROM = (3, 51, 3)  # earlier ones can corrupt a WAL database when it is reset
_OUTSIDE = "BUSY", "LOCKED", "FULL", "IOERR", "CANTOPEN", "NOMEM", "PERM", "INTERRUPT", "PROTOCOL", "AUTH"
_NOT_THE_FILE = frozenset(getattr(sqlite3, f"SQLITE_{name}") for name in _OUTSIDE)
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM measurements"
_INSERT = (
    f"INSERT INTO measurements ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    f"ON CONFLICT (key) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS[1:])}"
)


_UNREADABLE = (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError)
_START = 65_536  # bytes that tell whose file it is: the header and the schema of a database are in its first pages


class _ForeignFile(sqlite3.DatabaseError):
    """The path names a file of something else."""


class PerfDB:
    """Measurements by bucket of calls. Opened at first use; safe to share between threads, processes and forks."""

    def __init__(self, path: str | os.PathLike[str], *, ttl_s: float | None = None) -> None:
        self.path = Path(path)
        self.ttl_s = ttl_s
        self.problems: tuple[Reason, ...] = ()
        self._local = threading.local()
        self._lock = threading.Lock()

    # -- writing ---------------------------------------------------------------------------------
    def put(self, items: Iterable[Measurement]) -> int:
        """Store measurements; an older one of the same key is replaced. They are on disk when this returns."""
        rows = [to_row(item) for item in items]
        if not rows:
            return 0

        def insert() -> None:
            with self.writing() as connection:
                connection.executemany(_INSERT, rows)

        try:
            self._twice(insert, sqlite3.DatabaseError, UnicodeDecodeError)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            foreign = isinstance(error, _ForeignFile)
            raise CacheCorruptionError(
                "" if foreign else f"{self.path.name} cannot be written: {error}",
                code="PERF_FILE_FOREIGN" if foreign else None,
                value=str(self.path) if foreign else str(error),
                hint=None if foreign else "make room or correct the permissions there, or name another file",
            ) from error
        return len(rows)

    # -- reading ---------------------------------------------------------------------------------
    def find(self, op: str, bucket: str, *modes: str) -> list[Measurement]:
        """Every intact measurement of a bucket in these modes (default: "eager/hot"), of any platform.

        Nothing when the file is damaged or missing.
        """
        wanted = modes or ("eager/hot",)
        places = tuple(place_of(op, bucket, mode) for mode in wanted)
        rows = self.rows(f"{_SELECT} WHERE place IN ({', '.join('?' * len(places))})", places)
        found = [item for row in rows if (item := from_row(row)) is not None]
        # An index entry may point at a row of another bucket; the row's own fields decide.
        fresh = [item for item in found if item.op == op and item.bucket == bucket and item.mode in wanted]
        return [item for item in fresh if not self._expired(item)]

    def all(self) -> list[Measurement]:
        return [item for _, item in self.scan() if item is not None and not self._expired(item)]

    def __len__(self) -> int:
        rows = self.rows("SELECT count(*) FROM measurements")
        return int(rows[0][0]) if rows else 0

    def _expired(self, item: Measurement) -> bool:
        return self.ttl_s is not None and time.time() - item.measured_at > self.ttl_s

    def scan(self) -> Iterator[tuple[int, Measurement | None]]:
        """Every row with its number, read in pieces so that one bad page does not cost the others."""
        last = -(2**62)
        while True:
            query = f"SELECT rowid, {', '.join(COLUMNS)} FROM measurements WHERE rowid > ? ORDER BY rowid LIMIT 1000"
            rows = self.rows(query, (last,))
            for row in rows:
                yield row[0], from_row(row[1:])
            if len(rows) < 1000:
                return
            last = rows[-1][0]

    def rows(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """What a query gives; nothing when the file is damaged or missing."""
        if not self.path.exists():
            return []
        try:
            return self._twice(lambda: self._connection().execute(query, values).fetchall(), *_UNREADABLE)
        except _UNREADABLE as error:
            why = reason("CACHE_CORRUPT", f"{self.path.name}: {error}")
            if isinstance(error, _ForeignFile):
                why = reason("PERF_FILE_FOREIGN", str(self.path))
            if why not in self.problems:
                self.problems = (*self.problems, why)
                _log.warning("%s", why)
            return []

    # -- connections -----------------------------------------------------------------------------
    def _connection(self) -> sqlite3.Connection:
        """This thread's connection in this process; a fork or a replaced file gets a new one."""
        held = self._held()
        if held is not None and held[0] == self._identity():
            return held[1]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._foreign():
            raise _ForeignFile(f"{self.path} was written by something else")
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
            mode = "WAL" if sqlite3.sqlite_version_info >= _WAL_FROM else "TRUNCATE"
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("PRAGMA synchronous = FULL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1, VERSION):
                raise sqlite3.DatabaseError(f"schema version {version}, known: {VERSION}")
            if version == 0:
                with transaction(connection):
                    create(connection)
            elif version == 1:
                migrate(connection)
        except BaseException:
            connection.close()
            raise
        if held is not None:
            held[1].close()
        self._local.held = os.getpid(), (self._identity(), connection)
        return connection

    def _held(self) -> tuple[tuple[int, int] | None, sqlite3.Connection] | None:
        """The file that this thread has open and its connection; None where it has none, or another process made it."""
        pid, held = getattr(self._local, "held", (0, None))
        return held if pid == os.getpid() else None

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection()
        with transaction(connection):
            yield connection

    def close(self) -> None:
        held = self._held()
        if held is not None:
            held[1].close()
        self._local.held = 0, None

    # -- damage ----------------------------------------------------------------------------------
    def _twice(self, work: Callable[[], Result], *errors: type[Exception]) -> Result:
        """What `work` gives; where one of these errors says that the file is damaged, once more with a fresh one."""
        try:
            return work()
        except errors as error:
            if not self._damaged(error):
                raise
            self._set_aside(error)
        return work()

    def _damaged(self, error: Exception) -> bool:
        """Whether the file itself is wrong, as opposed to locked, out of reach or on a full disk.

        A message of SQLite that quotes damaged text cannot even be decoded; that is damage, too.
        """
        if isinstance(error, _ForeignFile) or self._foreign():
            return False
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_READONLY:  # a flipped bit in the header makes a file read-only, too
            return os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        return code not in _NOT_THE_FILE

    def _foreign(self) -> bool:
        """Whether something else wrote the file; what lies at our own place in the user's cache is ours."""
        try:
            with self.path.open("rb") as file:
                start = file.read(_START)
        except OSError:
            return False  # not there, or a matter for SQLite to speak about
        return bool(start) and not is_ours(start) and self.path != user_cache("perf.db")

    def _set_aside(self, error: BaseException) -> None:
        """Move the damaged file away and carry over what can still be read from it."""
        with self._lock:
            held, before = self._held(), self._identity()
            if held is not None:
                self.close()
                if held[0] != before:
                    return  # another thread or process has replaced it already
            name = set_aside(self.path)
            if not name:
                return
            kept = self.path.with_name(name)
            for tail in ("-journal", "-wal", "-shm"):  # they belong to the damaged file
                with contextlib.suppress(OSError):
                    os.replace(f"{self.path}{tail}", f"{kept}{tail}")
            why = reason("CACHE_CORRUPT", f"{self.path.name}: {error}", detail=f"kept as {kept.name}")
            self.problems = (*self.problems, why)
            _log.warning("%s; starting a fresh one", why)
            saved = list(_salvage(kept))
        if saved:
            with contextlib.suppress(sqlite3.Error), self.writing() as connection:
                connection.executemany(_INSERT, [to_row(item) for item in saved])


def _salvage(path: Path) -> Iterator[Measurement]:
    """The intact rows of a damaged file, as far as SQLite can still walk through it."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error:
        return
    try:
        try:
            cursor = connection.execute(_SELECT)
        except sqlite3.OperationalError:  # of version 1
            as_before(connection)
            cursor = connection.execute(_SELECT)
        for row in cursor:
            item = from_row(row)
            if item is not None:
                yield item
    except (sqlite3.Error, OverflowError, UnicodeDecodeError):
        return
    finally:
        connection.close()
