"""What this machine remembers of locks: how new the newest was, what was signed last, what it wrote itself.

`history.json` in the store, beside the builds. It changes only after a lock was written, signed or installed whole, so
that a step that fails half-way leaves the lock in force as it was. An older lock is known by its serial, under the path
it lies at and under the `lock-id` it carries; a machine that never saw the newer one cannot know, which is what the
lock's `expires` is for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero_hub import lockfile
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.places import locked, make_folders, write_json

_NAME = "history.json"


class Memory:
    """The memory of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- rollback ---------------------------------------------------------------------------------------------------
    def check(self, lock: Lock, path: Path) -> None:
        """Raise HUB_ROLLBACK for a lock older than one seen here, HUB_LOCK_INVALID for another of the same serial."""
        known = self._read().get("locks", {})
        for key in _keys(lock, path):
            seen = known.get(key)
            if not isinstance(seen, dict):
                continue
            if lock.serial < seen["serial"]:
                raise refuse("HUB_ROLLBACK", f"serial {lock.serial}", f"serial {seen['serial']}")
            if lock.serial and lock.serial == seen["serial"] and lock.content != seen["content"]:
                raise refuse("HUB_LOCK_INVALID", "serial", f"another lock of serial {lock.serial} was seen here")

    def newest(self, path: Path, lock_id: str) -> int:
        """The highest serial seen at this path or of this lock; 0 when there was none."""
        known = self._read().get("locks", {})
        return max(
            (known[key]["serial"] for key in (f"path:{_absolute(path)}", f"lock:{lock_id}") if key in known), default=0
        )

    def remember(self, lock: Lock, path: Path, *, ours: bool = False) -> None:
        """Note that this lock is in force; `ours` when this machine made it from what it saw at the hub."""

        def change(data: dict[str, Any]) -> None:
            for key in _keys(lock, path):
                data.setdefault("locks", {})[key] = {"serial": lock.serial, "content": lock.content}
            if ours:
                data.setdefault("ours", {})[_absolute(path)] = hashlib.sha256(lockfile.written(lock)).hexdigest()
            for kernel, variant in lock.variants():
                key = _build_key(kernel, variant)
                data[key] = [one for one in data.get(key, []) if one != variant.digest] + [variant.digest]

        self._change(change)

    def check_build(self, kernel: LockedKernel, variant: LockedVariant) -> None:
        """Raise HUB_ROLLBACK when the hub offers a build that was replaced by a newer one before."""
        seen = self._read().get(_build_key(kernel, variant), [])
        if variant.digest in seen and seen[-1] != variant.digest:
            raise refuse("HUB_ROLLBACK", variant.digest, seen[-1])

    # -- what happened here -----------------------------------------------------------------------------------------
    def is_ours(self, raw: bytes, path: Path) -> bool:
        """Whether `lz hub lock` wrote these very bytes on this machine."""
        return bool(self._read().get("ours", {}).get(_absolute(path)) == hashlib.sha256(raw).hexdigest())

    def remember_signed(self, lock: Lock, path: Path) -> None:
        """Keep the lock that was signed, to show later what changed since."""
        self._change(lambda data: data.setdefault("signed", {}).update({_absolute(path): lock.to_json()}))

    def last_signed(self, path: Path) -> Lock | None:
        kept = self._read().get("signed", {}).get(_absolute(path))
        try:
            return lockfile.parse(json.dumps(kept).encode()) if kept else None
        except HubError:
            return None  # kept by a version that wrote locks otherwise

    def lock_paths(self) -> tuple[Path, ...]:
        """Every place a lock of this store was seen at."""
        known = self._read().get("locks", {})
        return tuple(sorted(Path(key.removeprefix("path:")) for key in known if key.startswith("path:")))

    # -- the file ---------------------------------------------------------------------------------------------------
    def _read(self) -> dict[str, Any]:
        path = self.root / _NAME
        try:
            data = json.loads(path.read_bytes())
            if _is_sound(data):
                return dict(data)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:  # a disk that fails is no reason to forget
            raise refuse("HUB_STORE_KIND", _NAME, f"not readable: {error.strerror}") from None
        except (ValueError, RecursionError):
            pass
        # Damaged: set aside for whoever wants to look, and begun anew.
        with contextlib.suppress(OSError):
            os.replace(path, path.with_suffix(f".corrupt-{uuid.uuid4().hex[:8]}"))
        return {}

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Write what `change` makes of the memory; nothing when it stays as it is, for a store may be read-only."""
        same = self._read()
        change(same)
        if same == self._read():
            return
        with writing(_NAME):
            make_folders(self.root, 0o755)
            with locked(self.root, "history"):
                data = self._read()
                change(data)
                write_json(self.root / _NAME, data, os.stat(self.root).st_mode)


def _is_sound(data: Any) -> bool:
    if not isinstance(data, dict) or not all(
        isinstance(data.get(key, {}), dict) for key in ("locks", "ours", "signed")
    ):
        return False
    seen = data.get("locks", {}).values()
    return all(isinstance(one, dict) and type(one.get("serial")) is int and "content" in one for one in seen)


def _keys(lock: Lock, path: Path) -> tuple[str, ...]:
    here = f"path:{_absolute(path)}"
    return (here, f"lock:{lock.lock_id}") if lock.lock_id else (here,)


def _absolute(path: Path) -> str:
    return os.path.realpath(path)


def _build_key(kernel: LockedKernel, variant: LockedVariant) -> str:
    return f"{kernel.repo_id}@{kernel.version}/{variant.name}"
