"""Quarantine: kernels that took a process down, remembered on disk until someone lifts it.

After a sticky device error nothing in that process can fall back on that device; what can be done is to
skip the kernel at the next start. The file is JSON, read whole and written whole (temp file, fsync, rename),
so a reader never sees half of it; one that cannot be trusted is set aside and a new one begun.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerzero.files import write_whole
from layerzero.reasons import Reason, ReasonCode, reason

__all__ = ["Quarantine", "QuarantineEntry"]

_SCHEMA_VERSION = "1.0"
_MAX_BYTES = 4 * 2**20
_MAX_TEXT = 2000


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """One kernel, in one version, on one kind of device, and what it did."""

    kernel_id: str
    version: str
    device_signature: str
    code: str
    detail: str = ""
    since: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the entry: another version or another device is not quarantined."""
        return self.kernel_id, self.version, self.device_signature


class Quarantine:
    """The quarantine file. Reading it never raises for bad content; `problems` says what was wrong."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.problems: tuple[Reason, ...] = ()
        self._clock = clock

    def entries(self) -> tuple[QuarantineEntry, ...]:
        """All entries, sorted by key. A missing file is an empty one; a corrupt one is set aside."""
        return tuple(sorted(self._load().values(), key=lambda entry: entry.key))

    def check(self, kernel_id: str, version: str, device_signature: str) -> Reason | None:
        """The QUARANTINED reason of this kernel, or None."""
        found = self._load().get((kernel_id, version, device_signature))
        return None if found is None else _reason_of(found)

    def blocked(self, versions: Mapping[str, str], device_signature: str) -> dict[str, str]:
        """For `HealthBook.set_quarantined`: of the kernels {id: version}, those in quarantine and why. One read."""
        found = self._load()
        keys = {name: (name, version, device_signature) for name, version in versions.items()}
        return {name: _text_of(found[key]) for name, key in keys.items() if key in found}

    def add(
        self, kernel_id: str, version: str, device_signature: str, code: ReasonCode | str, detail: str = ""
    ) -> QuarantineEntry:
        """Remember a kernel. What other processes added meanwhile is kept."""
        entry = QuarantineEntry(
            kernel_id, version, device_signature, ReasonCode(code).value, detail[:_MAX_TEXT], self._clock()
        )
        with _FileLock(self.path):
            self._write(self._load() | {entry.key: entry})
        return entry

    def remove(self, kernel_id: str, version: str | None = None, device_signature: str | None = None) -> int:
        """Lift the quarantine of a kernel (of one version or device, when given); returns how many entries went."""

        def goes(entry: QuarantineEntry) -> bool:
            return (
                entry.kernel_id == kernel_id
                and version in (None, entry.version)
                and device_signature in (None, entry.device_signature)
            )

        with _FileLock(self.path):
            before = self._load()
            after = {key: entry for key, entry in before.items() if not goes(entry)}
            if len(after) != len(before):
                self._write(after)
        return len(before) - len(after)

    def _load(self) -> dict[tuple[str, str, str], QuarantineEntry]:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES} bytes")
            entries = _parse(json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._set_aside(f"{type(error).__name__}: {error}")
            return {}
        return {entry.key: entry for entry in entries}

    def _set_aside(self, why: str) -> None:
        kept = self.path.with_name(f"{self.path.name}.corrupt-{uuid.uuid4().hex}")
        try:
            os.replace(self.path, kept)
        except FileNotFoundError:
            return  # another process was faster
        self.problems = (
            *self.problems,
            reason(ReasonCode.CACHE_CORRUPT, f"{self.path.name}: {why}", detail=f"kept as {kept.name}"),
        )

    def _write(self, entries: Mapping[tuple[str, str, str], QuarantineEntry]) -> None:
        rows = [asdict(entries[key]) for key in sorted(entries)]
        text = json.dumps({"schema_version": _SCHEMA_VERSION, "entries": rows}, indent=1, sort_keys=True)
        write_whole(self.path, text + "\n")


def _parse(data: Any) -> list[QuarantineEntry]:
    if not isinstance(data, dict) or data.get("schema_version") != _SCHEMA_VERSION:
        raise ValueError(f"expected an object with schema_version {_SCHEMA_VERSION}")
    entries = [QuarantineEntry(**row) for row in data["entries"]]
    for entry in entries:
        texts = (*entry.key, entry.detail)
        if not all(isinstance(text, str) for text in texts) or not isinstance(entry.since, (int, float)):
            raise ValueError("an entry has a field of the wrong type")
        ReasonCode(entry.code)
    return entries


def _text_of(entry: QuarantineEntry) -> str:
    return f"{entry.code}: {entry.detail}" if entry.detail else entry.code


def _reason_of(entry: QuarantineEntry) -> Reason:
    return reason(ReasonCode.QUARANTINED, _text_of(entry), entry.device_signature)


class _FileLock:
    """An advisory lock beside the file, so that two processes adding at once both end up in it."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.lock")
        self._handle: int | None = None

    def __enter__(self) -> None:
        try:
            import fcntl
        except ImportError:  # no fcntl: the write stays atomic, the last of two writers wins
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)  # closing releases the lock
