"""Writing files that other processes read: whole or not at all, and one writer at a time."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def user_cache(name: str) -> Path:
    """A file or folder of this user's cache."""
    import platformdirs  # start-up time

    return Path(platformdirs.user_cache_dir("layerzero", appauthor=False)) / name


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content in one step: a reader sees the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temp, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the rename itself durable where the system allows opening a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, mode: int = 0o600) -> Iterator[None]:
    """Hold the advisory lock of this lock file: two processes that add to one file at once both end up in it."""
    try:
        import fcntl
    except ImportError:  # Windows: a write stays whole, the last of two writers wins
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # closing releases the lock
