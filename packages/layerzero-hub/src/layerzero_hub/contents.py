"""The files of a build, verified: each is opened once, and what was hashed is what is kept.

Sources stay in memory, shared objects in sealed descriptors that have no name: what happens to the store afterwards
changes nothing for a kernel that was verified.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedFile, LockedVariant

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CHUNK: Final = 2**20


@dataclass(frozen=True, slots=True)
class Contents:
    """A verified build: path inside it → bytes, of what is read as text; path → sealed descriptor, of binaries."""

    folder: Path
    variant: LockedVariant
    files: dict[str, bytes]
    objects: dict[str, int]

    def close(self) -> None:
        """Let the descriptors go; for a build whose code did not run."""
        while self.objects:
            os.close(self.objects.popitem()[1])


def read_file(folder: Path, path: str, variant: LockedVariant) -> bytes:
    """One file of a build, if its bytes are the locked ones; no more is read than they are long."""
    locked = variant.files[path]
    try:
        with open(folder / path, "rb") as file:
            data = file.read(locked.size + 1)
    except OSError as error:
        raise refuse("HUB_STORE_KIND", path, error.strerror or "not readable") from None
    if hashlib.sha256(data).hexdigest() != locked.sha256:
        raise refuse("HUB_STORE_TAMPERED", path, "another hash")
    return data


def open_build(folder: Path, variant: LockedVariant) -> Contents:
    """`verify_files`, and the bytes that were verified."""
    found = Contents(folder, variant, {}, {})
    try:
        verify_files(folder, variant, found)
    except BaseException:
        found.close()
        raise
    return found


def verify_files(folder: Path, variant: LockedVariant, keep: Contents | None = None) -> None:
    """Compare a folder with the lock: the same files, of the same bytes, and nothing else."""
    with contextlib.ExitStack() as stack:
        found: dict[str, tuple[int, str]] = {}
        pending = [("", _open_folder(folder.name, folder, None, stack))]
        while pending:
            prefix, here = pending.pop()
            for name in os.listdir(here):
                path = prefix + name
                mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    raise refuse("HUB_STORE_LINK", path)
                if stat.S_ISDIR(mode):
                    pending.append((f"{path}/", _open_folder(path, name, here, stack)))
                elif path not in variant.files:
                    raise refuse("HUB_STORE_EXTRA_FILE", path)
                else:
                    found[path] = here, name
        for path, locked in sorted(variant.files.items()):
            if path not in found:
                raise refuse("HUB_STORE_MISSING_FILE", path)
            _read_file(*found[path], path, locked, keep)


def _open_folder(shown: str, name: str | Path, above: int | None, stack: contextlib.ExitStack) -> int:
    try:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        raise refuse("HUB_STORE_MISSING_FILE", shown) from None
    except OSError as error:
        raise refuse("HUB_STORE_KIND", shown, error.strerror or "not readable") from None
    stack.callback(os.close, handle)
    check_owner_and_mode(os.fstat(handle), shown, handle)
    return handle


def _read_file(here: int, name: str, path: str, locked: LockedFile, keep: Contents | None) -> None:
    try:
        # O_NONBLOCK: a FIFO must not make us wait; O_NOFOLLOW: the file may have become a link since the walk.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
    except OSError as error:
        raise refuse("HUB_STORE_KIND", path, error.strerror or "not readable") from None
    with os.fdopen(handle, "rb", buffering=0) as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise refuse("HUB_STORE_KIND", path, "no regular file")
        if info.st_nlink != 1:
            raise refuse("HUB_STORE_LINK", path, detail="a hard link: another name leads to the same bytes")
        check_owner_and_mode(info, path, handle)
        if info.st_size != locked.size:
            raise refuse("HUB_STORE_TAMPERED", path, f"{info.st_size} bytes, {locked.size} locked")
        if _digest(file, name, path, keep) != locked.sha256:
            raise refuse("HUB_STORE_TAMPERED", path, "another hash")


def _digest(file: IO[bytes], name: str, path: str, keep: Contents | None) -> str:
    """The hash of a file; with `keep`, of the very bytes that are kept."""
    if keep is None:
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest, text, handle = hashlib.sha256(), bytearray(), -1
    part = file.read(_CHUNK)
    if part[:4] == b"\x7fELF" or ".so" in name:
        handle = os.memfd_create(f"layerzero-hub:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        keep.objects[path] = handle
    readable = handle < 0 and name.endswith((".py", ".json"))
    while part:
        digest.update(part)
        view = memoryview(part)
        while handle >= 0 and view:
            view = view[os.write(handle, view) :]
        if readable:
            text += part
        part = file.read(_CHUNK)
    if handle >= 0:
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
    elif readable:
        keep.files[path] = bytes(text)
    return digest.hexdigest()


# -- whose it is ----------------------------------------------------------------------------------------------------
def check_owner_and_mode(info: os.stat_result, name: str, place: Path | int) -> None:
    """Raise unless a file or folder belongs to this user or root, and nobody else may write it."""
    if info.st_uid not in (os.geteuid(), 0):
        raise refuse("HUB_STORE_OWNER", name, info.st_uid)
    if others_may_write(info, place):
        raise refuse("HUB_STORE_MODE", name, oct(stat.S_IMODE(info.st_mode)))


def others_may_write(info: os.stat_result, place: Path | int) -> bool:
    """Whether anybody but the owner may write: a group does not count that has no other member, nor an access list."""
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
