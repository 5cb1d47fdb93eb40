"""Namespaces of its own for a process that runs unknown code: no network, no home, no other process to read.

Linux gives them to any user, where it is set up so; what it refuses is returned in words, for whoever reads the report.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

_USER, _MOUNT, _PROCESS, _NET, _IPC, _NAME = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 4096, 16384, 1 << 18, 2, 4, 8
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_SET_DUMPABLE, _CAPBSET_DROP, _NO_NEW_PRIVS = 4, 24, 38
_AMBIENT, _AMBIENT_CLEAR = 47, 4
HIDDEN: Final = ("/home", "/root", "/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm", "/mnt", "/media")

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> list[str]:
    """Leave the namespaces of the parent: user, mounts, processes, network. What was refused, in words."""
    uid, gid = os.geteuid(), os.getegid()
    rest = _MOUNT | _PROCESS | _NET | _IPC | _NAME
    if _libc.unshare(_USER | rest) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return []
    why = os.strerror(ctypes.get_errno())
    if _libc.unshare(rest) == 0:
        return [f"no user namespace ({why})"]
    return [
        f"no namespaces ({why}): the kernel's code had the network, the files and the processes of this user in reach"
    ]


def confine(visible: Iterable[str], hidden: Sequence[str] = ()) -> list[str]:
    """In the new namespaces: own /proc, everything read-only, homes and places for temporary files empty.

    `visible` are folders that must be seen even below a hidden one. Capabilities are given up at the end, so that
    nothing of this can be undone.
    """
    notes = []
    if _libc.mount(None, b"/", None, _REC | _PRIVATE, None):
        return [f"no mounts of its own ({os.strerror(ctypes.get_errno())})"]
    attributes = struct.pack("<QQQQ", _READ_ONLY, 0, 0, 0)
    if _libc.syscall(_MOUNT_SETATTR, -100, b"/", _AT_RECURSIVE, attributes, len(attributes)):
        notes.append(f"files could be written ({os.strerror(ctypes.get_errno())})")
    homes = [os.path.expanduser("~")]
    with contextlib.suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    masks = _outermost((*HIDDEN, *homes, *hidden), lambda path: path != "/" and os.path.isdir(path))
    # What must be shown again, because it lies below a hidden folder; never the folder itself.
    shown = _outermost(filter(None, visible), lambda path: os.path.exists(path) and _is_below(path, masks))
    kept = [(path, os.open(path, os.O_PATH)) for path in shown]
    for place in masks:
        if _mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV, "mode=1777"):
            notes.append(f"{place} could be read ({os.strerror(ctypes.get_errno())})")
    for path, handle in kept:
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
        if not folder:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        if _mount(f"/proc/self/fd/{handle}", path, "", _BIND | _REC, ""):
            notes.append(f"{path} is missing ({os.strerror(ctypes.get_errno())})")
        os.close(handle)
    if _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, ""):
        notes.append(f"command lines of other processes could be read ({os.strerror(ctypes.get_errno())})")
    _drop_capabilities()
    return notes


def set_dumpable(value: bool) -> None:
    """Whether processes of the same user may read this one's memory, descriptors and environment."""
    _libc.prctl(_SET_DUMPABLE, int(value), 0, 0, 0)


def close_others(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard ones and these."""
    last = 3
    for handle in sorted(kept):
        os.closerange(last, handle)
        last = handle + 1
    os.closerange(last, max(last, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 2**20 else 65536))


def _outermost(paths: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """The paths that fit, as they really lie, outermost first; none below another."""
    found: list[str] = []
    for path in sorted({os.path.realpath(one) for one in paths}):
        if fits(path) and not _is_below(path, found):
            found.append(path)
    return found


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{one}/") for one in folders)


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> int:
    return int(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))


def _drop_capabilities() -> None:
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    _libc.capset(header, none)
