"""Who may write where the store lies: a folder that others can change, or rename, is no place for code."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.files import sync_folder
from layerzero_hub.errors import refuse


def check_owner_and_mode(info: os.stat_result, name: str, place: Path | int) -> None:
    """Raise unless a file or folder belongs to this user or root, and nobody else may write it."""
    if info.st_uid not in (os.geteuid(), 0):
        raise refuse("HUB_STORE_OWNER", name, info.st_uid)
    if _others_may_write(info, place):
        raise refuse("HUB_STORE_MODE", name, oct(stat.S_IMODE(info.st_mode)))


def check_above(root: Path) -> None:
    """Raise for a folder above the store in which others could put another store in its place.

    A folder with the sticky bit (/tmp) is no danger: there only owners rename and remove. Links are followed, and what
    lies above their targets is looked at in the same way.
    """
    pending, seen = [root], set()
    while pending:
        for place in reversed(pending.pop().parents):
            if place in seen:
                continue
            seen.add(place)
            try:
                info = os.lstat(place)
            except OSError as error:
                raise refuse("HUB_STORE_PARENT", str(place), error.strerror) from None
            if info.st_uid not in (os.geteuid(), 0):
                raise refuse("HUB_STORE_PARENT", str(place), f"it belongs to uid {info.st_uid}")
            if stat.S_ISLNK(info.st_mode):
                pending.append(Path(os.path.realpath(place)) / "x")
            elif not info.st_mode & stat.S_ISVTX and _others_may_write(info, place):
                raise refuse("HUB_STORE_PARENT", str(place), f"mode {stat.S_IMODE(info.st_mode):#o}")


def make_folders(folder: Path, mode: int) -> None:
    """Make a folder and what is missing above it; whatever the umask, nobody else may write there."""
    for place in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, mode & 0o755)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of this name in a folder of the store."""
    lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_json(path: Path, data: dict[str, Any], readers: int) -> None:
    """Replace a file of the store's memory in one step; whatever the umask, only its owner may write it."""
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fchmod(file.fileno(), 0o600 | readers & 0o044)
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _others_may_write(info: os.stat_result, place: Path | int) -> bool:
    if info.st_mode & 0o002:
        return True
    return bool(info.st_mode & 0o020) and not (_is_alone(info.st_uid, info.st_gid) and not _has_acl(place))


@functools.lru_cache(maxsize=64)
def _is_alone(uid: int, gid: int) -> bool:
    """Whether a group has its owner for only member, as with umask 002 and one group for each user."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(uid).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return set(group.gr_mem) <= {name} and all(user.pw_uid == uid for user in pwd.getpwall() if user.pw_gid == gid)


def _has_acl(place: Path | int) -> bool:
    """Whether the group's bits stand for an access list, which may name anybody."""
    try:
        os.getxattr(place, "system.posix_acl_access")
    except OSError:
        return False
    return True
