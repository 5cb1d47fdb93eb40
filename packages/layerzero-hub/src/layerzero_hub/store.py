"""The store: verified builds under the name of their digest, whole or not there. Shared by many processes.

<root>/sha256-<digest>/<variant>/…      one build; nothing is written here after the rename
<root>/staging-<uuid>/                  being filled, beside staging-<uuid>.lock, which its process holds
<root>/history.json                     locks and digests in the order they came, to notice a rollback (memory.py)
<root>/quarantine.json                  digests that did harm when loaded

The root's mode says who may read: builds are as readable as it is, so that root can fill a store for a service user,
who needs to write nothing there. Whatever the umask, nobody but the owner may write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerzero.files import sync_folder
from layerzero_hub.contents import Contents, open_build, verify_files
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.lockfile import LockedVariant
from layerzero_hub.places import check_above, check_owner_and_mode, locked, make_folders, write_json

# Digests that did harm in this process: refused here even where nothing could be written.
_harmful: dict[str, str] = {}


class Staging:
    """A private folder that becomes a build of the store, or vanishes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """A new file for writing; it must not exist, and no link is followed."""
        target = self.folder / path
        make_folders(target.parent, 0o700)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


class Store:
    """The folder of verified builds."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))

    # -- places -----------------------------------------------------------------------------------------------------
    def build_path(self, digest: str) -> Path:
        """Where the build of a digest lies or would lie."""
        return self.root / digest.replace(":", "-")

    def variant_path(self, variant: LockedVariant) -> Path:
        """The folder that holds the files of a build; it bears the variant's name, which `kernels` reads."""
        return self.build_path(variant.digest) / variant.name

    def prepare(self) -> None:
        """Make the root, writable for its owner alone, and check it and what lies above."""
        make_folders(self.root, 0o755)
        self._check_place()

    def _check_place(self) -> None:
        check_above(self.root)
        _check_folder(self.root, self.root.name)

    def installed(self, variant: LockedVariant) -> bool:
        """Whether a folder of that digest is there; `verify` says whether it is right."""
        return os.path.lexists(self.build_path(variant.digest))

    # -- verification -----------------------------------------------------------------------------------------------
    def verify(self, variant: LockedVariant) -> None:
        """Hash every byte again. Raises for a link, another owner or mode, an extra, missing or changed file."""
        verify_files(self._checked(variant), variant)

    def is_right(self, variant: LockedVariant) -> bool:
        """Whether `verify` finds nothing wrong."""
        try:
            self.verify(variant)
        except HubError:
            return False
        return True

    def open(self, variant: LockedVariant) -> Contents:
        """`verify`, and the very bytes that were verified: what is run is taken from them."""
        return open_build(self._checked(variant), variant)

    def _checked(self, variant: LockedVariant) -> Path:
        build = self.build_path(variant.digest)
        if not os.path.lexists(build):
            raise refuse("HUB_NOT_INSTALLED", variant.digest)
        self._check_place()
        _check_folder(build, build.name)
        for name in _listed(build):
            if name != variant.name:
                raise refuse("HUB_STORE_EXTRA_FILE", name)
        _check_folder(build / variant.name, variant.name)
        return build / variant.name

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
        readers = os.stat(self.root).st_mode & 0o055
        for folder, _, names in os.walk(staging.folder, topdown=False):
            for name in names:
                os.chmod(os.path.join(folder, name), 0o600 | readers & 0o044)
            os.chmod(folder, 0o700 | readers)
            sync_folder(Path(folder))
        with locked(self.root, f"build-{variant.digest.replace(':', '-')}"):
            final = self.build_path(variant.digest)
            if self.is_right(variant):
                return
            if os.path.lexists(final):
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
    def quarantined(self) -> dict[str, str]:
        """Digest → why, of what did harm on this machine. A list that cannot be read is an error, not an empty one."""
        found = dict(_harmful)
        for path in self._quarantines():
            found.update(_read_quarantine(path))
        return found

    def check_quarantine(self, digest: str) -> None:
        if digest in self.quarantined():
            raise refuse("HUB_REVOKED", digest, detail="quarantined on this machine after doing harm")

    def quarantine(self, digest: str, why: str) -> None:
        """Refuse this digest from now on: in the store, or where it cannot be written, for this user."""
        _harmful[digest] = why[:500]
        for path in self._quarantines():
            try:
                make_folders(path.parent, 0o700)
                with locked(path.parent, "quarantine"):
                    self._write(path, {**_read_quarantine(path), digest: why[:500]})
                return
            except (OSError, HubError):
                continue  # at least this process remembers

    def lift(self, digest: str) -> bool:
        """Take a digest out of quarantine; whether it was in it."""
        found = _harmful.pop(digest, None) is not None
        for path in self._quarantines():
            if digest in _read_quarantine(path):
                with locked(path.parent, "quarantine"):
                    self._write(path, {one: why for one, why in _read_quarantine(path).items() if one != digest})
                found = True
        return found

    def _quarantines(self) -> tuple[Path, Path]:
        import platformdirs

        own = Path(platformdirs.user_state_dir("layerzero", appauthor=False))
        return self.root / "quarantine.json", own / "hub-quarantine.json"

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        """As readable as the store, or for this user alone."""
        write_json(path, data, os.stat(self.root).st_mode if path.parent == self.root else 0)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise refuse("HUB_STORE_KIND", folder.name, error.strerror or "not readable") from None


def _check_folder(place: Path, name: str) -> None:
    try:
        info = os.lstat(place)
    except FileNotFoundError:
        raise refuse("HUB_STORE_MISSING_FILE", name) from None
    if stat.S_ISLNK(info.st_mode):
        raise refuse("HUB_STORE_LINK", name)
    if not stat.S_ISDIR(info.st_mode):
        raise refuse("HUB_STORE_KIND", name, "no folder")
    check_owner_and_mode(info, name, place)


def _remove(place: Path) -> None:
    if place.is_symlink() or not place.is_dir():
        place.unlink()
    else:
        shutil.rmtree(place)


def _read_quarantine(path: Path) -> dict[str, str]:
    try:
        if path.is_symlink() or path.exists():
            check_owner_and_mode(os.lstat(path), path.name, path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        if isinstance(error, PermissionError) and not os.access(path.parent, os.X_OK):
            return {}  # a folder this user may not enter: nothing of his was written there
        raise refuse("HUB_STORE_UNREADABLE", str(path), error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise refuse("HUB_STORE_UNREADABLE", str(path), "it is damaged") from None
    if not isinstance(data, dict):
        raise refuse("HUB_STORE_UNREADABLE", str(path), "it is damaged")
    return {str(digest): str(why) for digest, why in data.items()}
