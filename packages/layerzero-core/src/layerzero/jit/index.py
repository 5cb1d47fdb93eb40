"""The index of compiled artifacts: which exist, which could not be made, in which versions. One JSON file.

Written whole under a lock that all processes share. An artifact's name holds the kernel's version and the signature
of device, driver, torch and vendor libraries, so entries of other versions are simply never asked for. An entry whose
files are gone is not believed; a corrupt index is set aside, and kernels are compiled again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerzero.files import set_aside, write_whole
from layerzero.jit.cache import locked
from layerzero.json_form import Plain
from layerzero.model.artifact import Artifact
from layerzero.plugin.artifacts import cache_folder, distrust
from layerzero.reasons import Reason, reason

_log = logging.getLogger("layerzero.jit")
_SCHEMA_VERSION = "1.0"
_MAX_BYTES = 16 * 2**20
_MAX_ENTRIES = 4_096
_MAX_TEXT = 2_000
_LOCK_S = 10.0
_GIVE_UP = 3  # artifacts of one kernel that fail before the whole kernel is left alone


@dataclass(frozen=True, slots=True)
class Entry(Plain):
    """One artifact: compiled (`error` empty) or not to be had (`error` says why)."""

    kernel_id: str
    values: tuple[str, ...]
    error: str = ""
    evidence: tuple[str, ...] = ()
    seconds: float = 0.0
    at: float = 0.0

    def __post_init__(self) -> None:
        if len(self.values) < 2:
            raise ValueError("an artifact is named by a version and an environment at least")

    @property
    def artifact(self) -> Artifact:
        return self.kernel_id, self.values


class Index:
    """The index file in a cache folder. Reading it never raises for bad content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "index.json"

    def entries(self) -> tuple[Entry, ...]:
        """All entries whose files are still there, oldest first."""
        return tuple(entry for entry in self._load().values() if all(map(os.path.lexists, entry.evidence)))

    def ready(self) -> frozenset[Artifact]:
        return frozenset(entry.artifact for entry in self.entries() if not entry.error)

    def failed(self) -> dict[Artifact, str]:
        return {entry.artifact: entry.error for entry in self._load().values() if entry.error}

    def add(self, artifact: Artifact, *, error: str = "", evidence: Iterable[str] = (), seconds: float = 0.0) -> None:
        """Remember an outcome; what other processes added meanwhile is kept."""
        kernel_id, values = artifact
        entry = Entry(kernel_id, values, error[:_MAX_TEXT], tuple(evidence), round(seconds, 3), time.time())

        def put(known: dict[Artifact, Entry]) -> None:
            before = known.pop(artifact, None)
            if before is not None and not entry.error and not entry.evidence:  # found in the cache: the files are known
                known[artifact] = before if not before.error else entry
            else:
                known[artifact] = entry

        self._change(put)

    def forget_failures(self, kernel_ids: Iterable[str] | None = None) -> None:
        """Let kernels be compiled again that could not be."""
        chosen = None if kernel_ids is None else set(kernel_ids)

        def drop(known: dict[Artifact, Entry]) -> None:
            for artifact, entry in list(known.items()):
                if entry.error and (chosen is None or entry.kernel_id in chosen):
                    del known[artifact]

        self._change(drop)

    def _change(self, edit: Callable[[dict[Artifact, Entry]], None]) -> None:
        with locked(self.folder, "index", _LOCK_S):
            known = self._load()
            before = dict(known)
            edit(known)
            if known != before:
                rows = [entry.to_json() for entry in list(known.values())[-_MAX_ENTRIES:]]
                text = json.dumps({"schema_version": _SCHEMA_VERSION, "entries": rows}, indent=1)
                write_whole(self.path, text + "\n")

    def _load(self) -> dict[Artifact, Entry]:
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES} bytes")
            data = json.loads(self.path.read_bytes())
            if not isinstance(data, Mapping) or data.get("schema_version") != _SCHEMA_VERSION:
                raise ValueError(f"expected an object with schema_version {_SCHEMA_VERSION}")
            entries = map(Entry.from_json, data["entries"])
            return {entry.artifact: entry for entry in entries}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if kept := set_aside(self.path):
                _log.warning("the index of compiled kernels was corrupt (%s); kept as %s", error, kept)
            return {}
        except OSError as error:
            _log.warning("the index of compiled kernels cannot be read: %s", error)
            return {}


def known() -> dict[str, Any]:
    """The part of a World that the index on disk fills."""
    folder = cache_folder()
    if distrust(folder) is not None:
        return {}
    index = Index(folder)
    failed = {artifact: reason("JIT_FAILED", text) for artifact, text in index.failed().items()}
    return {"ready": index.ready(), "uncompilable": with_hopeless(failed)}


def with_hopeless(failed: Mapping[Any, Reason]) -> Mapping[Any, Reason]:
    """Kernels that failed for several values are left alone for all of them."""
    found = dict(failed)
    by_kernel: dict[tuple[str, ...], list[Any]] = {}
    for key, why in failed.items():
        if isinstance(key, tuple) and why.code == "JIT_FAILED":
            by_kernel.setdefault((key[0], *key[1][:2]), []).append(key)
    for (kernel_id, *_), keys in by_kernel.items():
        if len(keys) >= _GIVE_UP:
            found[kernel_id] = failed[keys[-1]]
    return MappingProxyType(found)
