"""Quarantine: kernels that took a process down, remembered on disk until someone lifts it.

After a sticky device error nothing in that process can fall back on that device; what can be done is to
skip the kernel at the next start. The file is JSON, read whole and written whole (temp file, fsync, rename),
so a reader never sees half of it; one that cannot be trusted is set aside and a new one begun.

A kernel whose process was ended from outside while it ran is only a suspect, counted here; the second time it is
in quarantine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.files import locked, set_aside, user_cache, write_whole
from layerzero.json_form import Plain, reader
from layerzero.reasons import Reason, ReasonCode, reason

SUSPECTED = 2
"""So many processes that ended during a kernel's first run, without a fault of their own, put it in quarantine."""

_OFF = ("off", "none", "0")
_SCHEMA_VERSION = "1.0"
_MAX_BYTES = 4 * 2**20
_MAX_TEXT = 2000


_Key = tuple[str, str, str]
_read_suspects = reader(tuple[tuple[str, str, str, int], ...])


@dataclass(frozen=True, slots=True)
class QuarantineEntry(Plain):
    """One kernel, in one version, on one kind of device, and what it did."""

    kernel_id: str
    version: str
    device_signature: str
    code: ReasonCode
    detail: str = ""
    since: float = 0.0

    @property
    def key(self) -> _Key:
        """What identifies the entry: another version or another device is not quarantined."""
        return self.kernel_id, self.version, self.device_signature

    @property
    def why(self) -> str:
        """What it did, in one line: for `HealthRegistry.set_quarantined`."""
        return f"{self.code}: {self.detail}" if self.detail else self.code


def default_file(named: str | None) -> Path | None:
    """The file of this user: what LAYERZERO_QUARANTINE names, None where it says off."""
    if named is not None:
        return None if named.lower() in _OFF else Path(named)
    return user_cache("quarantine.json")


class Quarantine:
    """The quarantine file. Reading it never raises for bad content; `problems` says what was wrong."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.problems: tuple[Reason, ...] = ()
        self._clock = clock
        self._lock = self.path.with_name(f".{self.path.name}.lock")

    def entries(self) -> tuple[QuarantineEntry, ...]:
        """All entries, sorted by key. A missing file is an empty one; a corrupt one is set aside."""
        return tuple(sorted(self._read()[0].values(), key=lambda entry: entry.key))

    def add(
        self, kernel_id: str, version: str, device_signature: str, code: ReasonCode | str, detail: str = ""
    ) -> QuarantineEntry:
        """Remember a kernel. What other processes added meanwhile is kept."""
        entry = QuarantineEntry(
            kernel_id, version, device_signature, ReasonCode(code), detail[:_MAX_TEXT], self._clock()
        )
        with locked(self._lock):
            entries, suspects = self._read()
            suspects.pop(entry.key, None)
            self._write(entries | {entry.key: entry}, suspects)
        return entry

    def suspect(self, kernel_id: str, version: str, device_signature: str) -> int:
        """Count one more process that ended while the kernel ran; returns how many that makes."""
        key = (kernel_id, version, device_signature)
        with locked(self._lock):
            entries, suspects = self._read()
            suspects[key] = suspects.get(key, 0) + 1
            self._write(entries, suspects)
        return suspects[key]

    def remove(self, kernel_id: str, version: str | None = None, device_signature: str | None = None) -> int:
        """Lift the quarantine of a kernel (of one version or device, when given); returns how many entries went."""
        wanted = (kernel_id, version, device_signature)

        def goes(key: _Key) -> bool:
            return all(given in (None, own) for given, own in zip(wanted, key, strict=True))

        with locked(self._lock):
            before, suspects = self._read()
            after = {key: entry for key, entry in before.items() if not goes(key)}
            kept = {key: times for key, times in suspects.items() if key[0] != kernel_id}
            if len(after) != len(before) or len(kept) != len(suspects):
                self._write(after, kept)
        return len(before) - len(after)

    def _read(self) -> tuple[dict[_Key, QuarantineEntry], dict[_Key, int]]:
        """Entries, and how often a suspect was met."""
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES} bytes")
            data = json.loads(self.path.read_bytes())
            if not isinstance(data, dict) or data.get("schema_version") != _SCHEMA_VERSION:
                raise ValueError(f"expected an object with schema_version {_SCHEMA_VERSION}")
            if any(row.keys() - QuarantineEntry.__dataclass_fields__.keys() for row in data["entries"]):
                raise ValueError("an entry has a field that is not known")
            entries = [QuarantineEntry.from_json(row) for row in data["entries"]]
            suspects = {tuple(key): times for *key, times in _read_suspects(data.get("suspects", ()))}
        except FileNotFoundError:
            return {}, {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if kept := set_aside(self.path):
                words = f"{self.path.name}: {type(error).__name__}: {error}"
                why = reason(ReasonCode.CACHE_CORRUPT, words, detail=f"kept as {kept}")
                self.problems = (*self.problems, why)
            return {}, {}
        return {entry.key: entry for entry in entries}, suspects

    def _write(self, entries: Mapping[_Key, QuarantineEntry], suspects: Mapping[_Key, int]) -> None:
        data: dict[str, Any] = {
            "schema_version": _SCHEMA_VERSION, "entries": [entries[key].to_json() for key in sorted(entries)],
        }  # fmt: skip
        if suspects:
            data["suspects"] = [[*key, suspects[key]] for key in sorted(suspects)]
        write_whole(self.path, json.dumps(data, indent=1, sort_keys=True) + "\n")
