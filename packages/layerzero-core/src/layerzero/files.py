"""Files that others write or read: JSON without doubt; written whole or not at all, and by one writer at a time."""

from __future__ import annotations

import json
import math
import os
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_POLL_S = 0.02


def user_cache(name: str) -> Path:
    """A file or folder of this user's cache."""
    import platformdirs  # start-up time

    return Path(platformdirs.user_cache_dir("layerzero", appauthor=False)) / name


def decode_strictly(text: str, twice: Callable[[str], Exception], constant: Callable[[str], Exception]) -> Any:
    """JSON that somebody else wrote; `twice` and `constant` make the errors for a key given twice and for a NaN."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise twice(Counter(key for key, _ in pairs).most_common(1)[0][0])
        return found

    def refuse(word: str) -> Any:
        raise constant(word)

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


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


def set_aside(path: Path) -> str:
    """Move a damaged file out of the way and keep it; its new name, "" where another process was faster."""
    kept = path.with_name(f"{path.name}.corrupt-{uuid.uuid4().hex}")
    try:
        os.replace(path, kept)
    except FileNotFoundError:
        return ""
    return kept.name


def ours_alone(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and nobody else may write to it."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & others)


@contextmanager
def locked(path: Path, mode: int = 0o600, timeout_s: float = math.inf) -> Iterator[bool]:
    """Hold the advisory lock of this lock file, which all processes share; False when it could not be had in time."""
    try:
        import fcntl
    except ImportError:  # Windows: a write stays whole, the last of two writers wins
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    deadline = time.monotonic() + timeout_s
    try:
        held = False
        while not held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if timeout_s == math.inf else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        yield held
    finally:
        os.close(handle)  # closing releases the lock
