"""The store: verified builds under the name of their digest, whole or not there. Shared by many processes.

<root>/sha256-<digest>/<variant>/…      one build; nothing is written here after the rename
<root>/staging-<uuid>/                  being filled, beside staging-<uuid>.lock, which its process holds
<root>/history.json                     locks and digests in the order they came, to notice a rollback (signing.py)
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
from typing import IO, Any

import platformdirs

from layerzero.files import sync_folder
from layerzero_hub.contents import Contents, check_owner_and_mode, open_build, others_may_write, verify_files
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.lockfile import LockedVariant

# Digests that did harm in this process: refused here even where nothing could be written.
_harmful: dict[str, str] = {}


class Store:
    """The folder of verified builds."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))

    # -- places -----------------------------------------------------------------------------------------------------
    def build_path(self, digest: str) -> Path:
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
        _check_folder(self.root)

    def installed(self, variant: LockedVariant) -> bool:
        """Whether a folder of that digest is there; `verify` says whether it is right."""
        return os.path.lexists(self.build_path(variant.digest))

    # -- verification -----------------------------------------------------------------------------------------------
    def verify(self, variant: LockedVariant) -> None:
        """Hash every byte again. Raises for a link, another owner or mode, an extra, missing or changed file."""
        verify_files(self._checked(variant), variant)

    def is_right(self, variant: LockedVariant) -> bool:
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
        _check_folder(build)
        try:
            names = os.listdir(build)
        except OSError as error:
            raise refuse("HUB_STORE_KIND", build.name, error.strerror or "not readable") from None
        for name in names:
            if name != variant.name:
                raise refuse("HUB_STORE_EXTRA_FILE", name)
        _check_folder(build / variant.name)
        return build / variant.name

    # -- filling ----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh private folder, removed at the end unless it was committed. A killed process's is collected later."""
        self.prepare()
        self._collect()
        lock, folder = self._claim()
        try:
            folder.mkdir(mode=0o700)
            yield folder
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

    def commit(self, staging: Path, variant: LockedVariant) -> None:
        """Verify the staged build and rename it into place. One that is there already and right is left alone."""
        verify_files(staging / variant.name, variant)
        if os.listdir(staging) != [variant.name]:
            raise refuse("HUB_STORE_EXTRA_FILE", staging.name)
        readers = os.stat(self.root).st_mode & 0o055
        for folder, _, names in os.walk(staging, topdown=False):
            for name in names:
                os.chmod(os.path.join(folder, name), 0o600 | readers & 0o044)
            os.chmod(folder, 0o700 | readers)
            sync_folder(Path(folder))
        final = self.build_path(variant.digest)
        with locked(self.root, f"build-{final.name}"):
            if self.is_right(variant):
                return
            if os.path.lexists(final):
                self.discard(final)  # damaged or planted: never repaired in place
            os.rename(staging, final)
            sync_folder(self.root)

    def discard(self, place: Path) -> None:
        """Remove something; renamed first, so that half a build never lies under the name of a whole one."""
        aside = self.root / f"damaged-{uuid.uuid4().hex}"
        os.rename(place, aside)
        with contextlib.suppress(OSError):
            _remove(aside)

    def _collect(self) -> None:
        """Remove what killed processes left behind."""
        for entry in list(os.scandir(self.root)):
            with contextlib.suppress(OSError):
                if entry.name.startswith("damaged-"):
                    _remove(Path(entry.path))
                elif entry.name.startswith("staging-"):
                    self._collect_one(self.root / entry.name.removesuffix(".lock"))

    def _collect_one(self, folder: Path) -> None:
        lock = folder.with_name(f"{folder.name}.lock")
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):  # the lock goes last: where there is none, nobody holds it
                handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                held.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.lexists(folder):
                _remove(folder)
            lock.unlink(missing_ok=True)

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
        own = Path(platformdirs.user_state_dir("layerzero", appauthor=False))
        return self.root / "quarantine.json", own / "hub-quarantine.json"

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        """As readable as the store, or for this user alone."""
        write_json(path, data, os.stat(self.root).st_mode if path.parent == self.root else 0)


def _check_folder(place: Path) -> None:
    try:
        info = os.lstat(place)
    except FileNotFoundError:
        raise refuse("HUB_STORE_MISSING_FILE", place.name) from None
    if stat.S_ISLNK(info.st_mode):
        raise refuse("HUB_STORE_LINK", place.name)
    if not stat.S_ISDIR(info.st_mode):
        raise refuse("HUB_STORE_KIND", place.name, "no folder")
    check_owner_and_mode(info, place.name, place)


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
            elif not info.st_mode & stat.S_ISVTX and others_may_write(info, place):
                raise refuse("HUB_STORE_PARENT", str(place), f"mode {stat.S_IMODE(info.st_mode):#o}")


def make_folders(folder: Path, mode: int) -> None:
    """Make a folder and what is missing above it; whatever the umask, nobody else may write there."""
    for place in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, mode & 0o755)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file for writing; it must not exist, and no link is followed."""
    make_folders(path.parent, 0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


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
        with new_file(temp) as file:
            file.write(json.dumps(data, indent=1, sort_keys=True).encode() + b"\n")
            os.fchmod(file.fileno(), 0o600 | readers & 0o044)
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
