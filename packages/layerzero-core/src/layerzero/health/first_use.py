"""Which kernels were held against the baseline on this machine, remembered across processes.

One small file for each kernel, version and family of devices, in a folder beside the quarantine: mode 0700, ours alone.
Whoever may write there could vouch for any kernel, so a folder or a file that is not ours, or that others may write to,
is not believed. Files are written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.files import locked, ours_alone, write_whole
from layerzero.reasons import Reason, reason

FOLDER = "first_use"
_SCHEMA_VERSION = "1.0"
_MAX_BYTES = 1 << 20
_MAX_KINDS = 4096


class Checked(NamedTuple):
    """What was checked: one kernel, in these versions (package, vendor, torch), on one family of devices."""

    kernel_id: str
    version: str
    family: str

    @property
    def file(self) -> str:
        return f"{self.kernel_id}-{hashlib.sha256(chr(0).join(self).encode()).hexdigest()[:20]}.json"


class FirstUses:
    """The folder. Reading never raises; `problem` says why it is not believed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem: Reason | None = None

    def kinds(self, who: Checked) -> dict[str, float]:
        """Kinds of call in which the kernel was right, and by how much it was off."""
        try:
            path = self.folder / who.file
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return {}
        with open(handle, "rb") as file:
            if not self._ours(self.folder.stat(), self.folder) or not self._ours(os.fstat(file.fileno()), path):
                return {}
            raw = file.read(_MAX_BYTES + 1)
        try:
            data = json.loads(raw)
            ours = len(raw) <= _MAX_BYTES and data["schema_version"] == _SCHEMA_VERSION
            if not ours or Checked(data["kernel_id"], data["version"], data["family"]) != who:
                return {}
            return {str(kind): float(error) for kind, error in data["kinds"].items()}
        except (ValueError, TypeError, KeyError, RecursionError):
            return {}  # half a file of another program, or none of ours: checked once more, and written anew

    def add(self, who: Checked, kind: str, error: float) -> bool:
        """Remember that a kernel was right. False where it cannot be kept; what others added meanwhile is kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._ours(self.folder.stat(), self.folder):
                return False
            with locked(self.folder / ".lock"):
                known = self.kinds(who)
                if len(known) >= _MAX_KINDS:
                    known = {}
                data: dict[str, Any] = {"schema_version": _SCHEMA_VERSION, **who._asdict()}
                data |= {"kinds": dict(sorted({**known, kind: error}.items())), "written": round(time.time())}
                write_whole(self.folder / who.file, json.dumps(data, indent=1) + "\n")
        except OSError as problem:
            self.problem = reason("CONFIG_INVALID", f"{self.folder}: {problem}", "a folder that can be written")
            return False
        return True

    def _ours(self, found: os.stat_result, what: Path) -> bool:
        if ours_alone(found):
            return True
        shown = f"{what} with mode {stat.S_IMODE(found.st_mode):04o}"
        self.problem = reason("CONFIG_INVALID", shown, "your own folder, mode 0700")
        return False
