"""The store: verified builds under the name of their digest, whole or not there. Shared by many processes.

<root>/sha256-<digest>/<variant>/…      one build; nothing is written here after the rename
<root>/staging-<uuid>/                  being filled, beside staging-<uuid>.lock, which its process holds
<root>/history.json                     digests in the order they were locked, to notice a rollback
<root>/quarantine.json                  digests that did harm when loaded
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.files import sync_folder, write_whole
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.lockfile import LockedKernel, LockedVariant

__all__ = ["Staging", "Store"]


class Staging:
    """A private folder that becomes a build of the store, or vanishes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A new file for writing; it must not exist, and no link is followed."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


class Store:
    """The folder of verified builds."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- places -----------------------------------------------------------------------------------------------------
    def build_path(self, digest: str) -> Path:
        """Where the build of a digest lies or would lie."""
        return self.root / digest.replace(":", "-")

    def variant_path(self, variant: LockedVariant) -> Path:
        """The folder that holds the files of a build; it bears the variant's name, which `kernels` reads."""
        return self.build_path(variant.digest) / variant.name

    def prepare(self) -> None:
        """Make the root, private to its owner, and check it."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner_and_mode(os.lstat(self.root), str(self.root))

    def installed(self, variant: LockedVariant) -> bool:
        """Whether a folder of that digest is there; `verify` says whether it is right."""
        return os.path.lexists(self.build_path(variant.digest))

    # -- verification -----------------------------------------------------------------------------------------------
    def verify(self, variant: LockedVariant) -> None:
        """Hash every byte again. Raises for a link, another owner or mode, an extra, missing or changed file."""
        build = self.build_path(variant.digest)
        if not os.path.lexists(build):
            raise refuse("HUB_NOT_INSTALLED", variant.digest)
        for place in (self.root, build, build / variant.name):
            _check_folder(place, place.name)
        for entry in list(os.scandir(build)):
            if entry.name != variant.name:
                raise refuse("HUB_STORE_EXTRA_FILE", entry.name)
        verify_files(build / variant.name, variant)

    # -- filling ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def staging(self) -> Iterator[Staging]:
        """A fresh private folder, removed at the end unless it was committed. A killed process's is collected later."""
        self.prepare()
        self.collect()
        lock, folder = self._claim()
        try:
            folder.mkdir(mode=0o700)
            yield Staging(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}.lock")
            os.close(lock)

    def _claim(self) -> tuple[int, Path]:
        """A name for a staging folder with its lock held: whoever finds it knows that its process lives."""
        while True:
            folder = self.root / f"staging-{uuid.uuid4().hex}"
            lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                # Between open and flock another process may have collected the file: then it is not ours.
                if os.stat(f"{folder}.lock").st_ino == os.fstat(lock).st_ino:
                    return lock, folder
            os.close(lock)

    def commit(self, staging: Staging, variant: LockedVariant) -> None:
        """Verify the staged build and rename it into place. One that is there already and right is left alone."""
        verify_files(staging.folder / variant.name, variant)
        if os.listdir(staging.folder) != [variant.name]:
            raise refuse("HUB_STORE_EXTRA_FILE", str(staging.folder.name))
        for folder, _, _ in os.walk(staging.folder, topdown=False):
            sync_folder(Path(folder))
        with self._locked(f"build-{variant.digest.replace(':', '-')}"):
            final = self.build_path(variant.digest)
            if os.path.lexists(final):
                try:
                    self.verify(variant)
                    return
                except HubError:
                    # Damaged or planted: set aside and removed, never repaired in place.
                    aside = self.root / f"damaged-{uuid.uuid4().hex}"
                    os.rename(final, aside)
                    with contextlib.suppress(OSError):
                        _remove(aside)
            os.rename(staging.folder, final)
            sync_folder(self.root)

    def collect(self) -> int:
        """Remove what killed processes left behind; returns how many staging folders that were."""
        gone = 0
        for entry in list(os.scandir(self.root)):
            with contextlib.suppress(OSError):
                if entry.name.startswith("damaged-"):
                    _remove(Path(entry.path))
                elif entry.name.startswith("staging-"):
                    gone += self._collect_one(entry.name.removesuffix(".lock"))
        return gone

    def _collect_one(self, name: str) -> int:
        lock = self.root / f"{name}.lock"
        try:
            handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            handle = None  # the lock goes last, so nobody holds this one
        try:
            if handle is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.path.lexists(self.root / name)
            if there:
                _remove(self.root / name)
            lock.unlink(missing_ok=True)
            return int(there)
        finally:
            if handle is not None:
                os.close(handle)

    # -- memory -----------------------------------------------------------------------------------------------------
    def remember(self, kernel: LockedKernel, variant: LockedVariant, *, allow_rollback: bool = False) -> None:
        """Note that this digest is the newest of its kernel; an older one raises HUB_ROLLBACK unless allowed."""
        self.prepare()
        with self._locked("history"):
            history = _read_json(self.root / "history.json")
            key = f"{kernel.repo_id}@{kernel.version}/{variant.name}"
            seen = [one for one in history.get(key, []) if isinstance(one, str)]
            if seen and seen[-1] == variant.digest:
                return
            if variant.digest in seen and not allow_rollback:
                raise refuse("HUB_ROLLBACK", variant.digest, seen[-1])
            history[key] = [one for one in seen if one != variant.digest] + [variant.digest]
            write_whole(self.root / "history.json", json.dumps(history, indent=1, sort_keys=True) + "\n")

    def check_not_rolled_back(self, kernel: LockedKernel, variant: LockedVariant) -> None:
        """Raise HUB_ROLLBACK when a later build of this kernel was locked on this machine."""
        seen = _read_json(self.root / "history.json").get(f"{kernel.repo_id}@{kernel.version}/{variant.name}", [])
        if variant.digest in seen and seen[-1] != variant.digest:
            raise refuse("HUB_ROLLBACK", variant.digest, seen[-1])

    def quarantined(self) -> frozenset[str]:
        """Digests that changed the dispatcher or crashed when loaded on this machine."""
        return frozenset(_read_json(self.root / "quarantine.json"))

    def quarantine(self, digest: str, why: str) -> None:
        """Refuse this digest from now on."""
        with self._locked("quarantine"):
            known = _read_json(self.root / "quarantine.json")
            known[digest] = why[:500]
            write_whole(self.root / "quarantine.json", json.dumps(known, indent=1, sort_keys=True) + "\n")

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with open(self.root / f".{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def verify_files(folder: Path, variant: LockedVariant) -> None:
    """Compare a folder with the lock: the same files, of the same bytes, and nothing else."""
    found: set[str] = set()
    pending = [("", folder)]
    while pending:
        prefix, here = pending.pop()
        for entry in list(os.scandir(here)):
            path = prefix + entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise refuse("HUB_STORE_LINK", path)
            if stat.S_ISDIR(mode):
                _check_folder(here / entry.name, path)
                pending.append((f"{path}/", here / entry.name))
                continue
            if path not in variant.files:
                raise refuse("HUB_STORE_EXTRA_FILE", path)
            found.add(path)
    for path, locked in sorted(variant.files.items()):
        if path not in found:
            raise refuse("HUB_STORE_MISSING_FILE", path)
        _verify_file(folder / path, path, locked.sha256, locked.size)


def _verify_file(place: Path, path: str, sha256: str, size: int) -> None:
    try:
        # O_NONBLOCK: a FIFO must not make us wait; O_NOFOLLOW: the file may have become a link since the walk.
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise refuse("HUB_STORE_KIND", path, error.strerror or "not readable") from None
    with os.fdopen(handle, "rb", buffering=0) as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise refuse("HUB_STORE_KIND", path, "no regular file")
        if info.st_nlink != 1:
            raise refuse("HUB_STORE_LINK", path, detail="a hard link: another name leads to the same bytes")
        _check_owner_and_mode(info, path)
        if info.st_size != size:
            raise refuse("HUB_STORE_TAMPERED", path, f"{info.st_size} bytes, {size} locked")
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise refuse("HUB_STORE_TAMPERED", path, "another hash")


def _check_folder(place: Path, name: str) -> None:
    try:
        info = os.lstat(place)
    except FileNotFoundError:
        raise refuse("HUB_STORE_MISSING_FILE", name) from None
    if stat.S_ISLNK(info.st_mode):
        raise refuse("HUB_STORE_LINK", name)
    if not stat.S_ISDIR(info.st_mode):
        raise refuse("HUB_STORE_KIND", name, "no folder")
    _check_owner_and_mode(info, name)


def _check_owner_and_mode(info: os.stat_result, name: str) -> None:
    if info.st_uid not in (os.geteuid(), 0):
        raise refuse("HUB_STORE_OWNER", name, info.st_uid)
    if info.st_mode & 0o022:
        raise refuse("HUB_STORE_MODE", name, oct(stat.S_IMODE(info.st_mode)))


def _remove(place: Path) -> None:
    if place.is_symlink() or not place.is_dir():
        place.unlink()
    else:
        shutil.rmtree(place)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict):
            return data
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        pass
    # Unreadable: set aside for whoever wants to look, and begun anew.
    with contextlib.suppress(OSError):
        os.replace(path, path.with_suffix(f".corrupt-{uuid.uuid4().hex[:8]}"))
    return {}
