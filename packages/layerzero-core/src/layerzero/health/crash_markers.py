"""CrashMarkers: which kernels a process was running for the first time, left where the next process finds them.

A kernel that crashes its process cannot report itself. So before the first run of a kernel its name is written into a
small file that is mapped into memory (a crash does not lose it, and writing costs a copy), and wiped out after the
run. A marker whose process is gone names a suspect. While such a run lasts, Python's fault handler writes into a second
file what signal ended the process, unless the program has set up a handler itself: a crash is then told from a kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import mmap
import os
import platform
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from layerzero.device.memory import text_of
from layerzero.json_form import Plain

_SLOTS = 16
_SLOT = 512
_SIZE = _SLOTS * _SLOT
_MOST_FILES = 512
_KEPT_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class CrashMarker(Plain):
    """One kernel that was being run when its process ended; `fault` is the fatal signal in words, if there was one."""

    kernel_id: str
    version: str
    device_signature: str
    op: str = ""
    fault: str = ""


class CrashMarkers:
    """The markers of this process. Nothing is written before the first `enter`; trouble with the file costs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._paths: tuple[Path, Path] | None = None
        self._fault: IO[bytes] | None = None
        self._free = list(range(_SLOTS))
        self._texts: dict[tuple[str, str, str, str], bytes] = {}
        self._handling = False
        self._off = False
        self._modules, self._foreign = -1, False

    def enter(self, kernel_id: str, version: str, signature: str, op: str = "") -> int | None:
        """Say that the kernel is about to run; returns what `leave` takes. None when no crash marker could be left."""
        key = (kernel_id, version, signature, op)
        text = self._texts.get(key)
        if text is None:
            text = json.dumps(CrashMarker(*key).to_json()).encode()
            if len(text) >= _SLOT or self._off:
                return None
            self._texts[key] = text
        with self._lock:
            if (self._map is None and not self._open()) or not self._free:
                return None
            slot = self._free.pop()
            assert self._map is not None
            start = slot * _SLOT
            # The first byte last: a half written crash marker is an empty one.
            self._map[start + 1 : start + len(text) + 1] = text[1:] + b"\0"
            self._map[start : start + 1] = text[:1]
            self._listen()
            return slot

    def leave(self, slot: int | None) -> None:
        """Say that the run is over, however it ended."""
        if slot is None:
            return
        with self._lock:
            if self._map is None:  # a fork or a reset in between
                return
            self._map[slot * _SLOT : slot * _SLOT + 1] = b"\0"
            self._free.append(slot)
            if len(self._free) == _SLOTS and self._handling:
                faulthandler.disable()
                self._handling = False

    def close(self) -> None:
        """Take the files away: the process ends well."""
        with self._lock:
            self._drop(remove=True)

    def after_fork(self) -> None:
        """The files are the parent's; this process makes its own when it needs them."""
        self._lock = threading.Lock()
        self._drop(remove=False)

    def _drop(self, *, remove: bool) -> None:
        if self._handling:
            faulthandler.disable()
            self._handling = False
        if self._map is not None and remove:
            self._map[:] = bytes(_SIZE)
        if self._fault is not None:
            with contextlib.suppress(OSError):
                self._fault.close()
        if self._paths is not None and remove:
            _remove(*self._paths)
        self._map = self._paths = self._fault = None
        self._free = list(range(_SLOTS))

    def _open(self) -> bool:
        stem = f"{here()}-{os.getpid()}-{started(os.getpid())}"
        path, fault = self.folder / f"{stem}.marker", self.folder / f"{stem}.fault"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                # Written, not only made longer: on a full disk a mapping of a hole would kill its writer.
                if os.write(handle, bytes(_SIZE)) != _SIZE:
                    raise OSError("no space left for markers")
                self._map = mmap.mmap(handle, _SIZE)
            finally:
                os.close(handle)
            self._fault = open(fault, "wb", buffering=0)  # kept open for the fault handler
        except (OSError, ValueError):
            self._map, self._off = None, True
            _remove(path)
            return False
        self._paths = (path, fault)
        return True

    def _listen(self) -> None:
        """A handler that the program has set up already stays; ours lasts as long as a first run does."""
        if self._handling or self._fault is None or faulthandler.is_enabled():
            return
        if self._modules != len(sys.modules):  # a library that handles such signals itself came with an import
            self._modules = len(sys.modules)
            # Whether SIGSEGV has a handler already, one of C code (a Java machine has one, and needs it).
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text_of("/proc/self/status"), re.MULTILINE)
            self._foreign = caught is not None and bool(int(caught[1], 16) >> (signal.SIGSEGV - 1) & 1)
        if self._foreign:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.enable(self._fault, all_threads=False)
            self._handling = True


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def started(pid: int) -> str:
    """When a process began, in the words of its system: with the pid it names one process. "0" where it cannot tell."""
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else "0"


@functools.lru_cache(maxsize=1)
def here() -> str:
    """This machine, since it was started, and the container of this process: only there does a pid mean anything."""
    parts = [platform.node(), *filter(None, [text_of("/proc/sys/kernel/random/boot_id")])]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _gone(path: Path) -> bool:
    """Whether the process that left this file is known to have ended. Of other machines and containers nobody knows."""
    where, _, rest = path.stem.partition("-")
    pid, _, begun = rest.partition("-")
    if where != here() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return begun != "0" and started(int(pid)) != begun


def gather(folder: Path, take: Any) -> int:
    """Hand every crash marker of a process that is gone to `take(marker)`, once; returns how many there were.

    A file is claimed by renaming it, so that of several processes that start at once one reports it, and removed
    only after `take` has returned: what could not be written down is found again at the next start.
    """
    try:
        files = sorted(folder.glob("*.marker"))[:_MOST_FILES]
    except OSError:
        return 0
    count = 0
    for path in files:
        if not _gone(path):
            with contextlib.suppress(OSError):  # a file nobody here can judge goes when it is older than any first run
                if path.stem.partition("-")[0] != here() and time.time() - path.stat().st_mtime > _KEPT_S:
                    _remove(path, path.with_suffix(".fault"))
            continue
        mine, fault = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.claimed"), path.with_suffix(".fault")
        try:
            os.rename(path, mine)
        except OSError:
            continue  # another process was faster, or the folder is not ours
        try:
            for marker in _read(mine, fault):
                take(marker)
                count += 1
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(mine, path)
            continue
        _remove(mine, fault)
    return count


def _read(path: Path, fault: Path) -> Iterator[CrashMarker]:
    """What a file of crash markers says; slots that are no crash marker say nothing."""
    try:
        data = path.read_bytes()[:_SIZE]
    except OSError:
        return
    # "Segmentation fault", as Python's fault handler writes it; empty when the process was killed or left.
    first, sign = text_of(fault).partition("\n")[0][:400].strip(), "Fatal Python error: "
    words = first.removeprefix(sign) if first.startswith(sign) else ""
    for start in range(0, len(data), _SLOT):
        text = data[start : start + _SLOT].split(b"\0", 1)[0]
        if not text:
            continue
        try:
            marker = CrashMarker.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        yield replace(marker, fault=words)
