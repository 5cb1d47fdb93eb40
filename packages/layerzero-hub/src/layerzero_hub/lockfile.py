"""`layerzero-hub.lock`: which bytes of which kernels may run. Strict to read, stable to write.

Unknown keys, repeated keys, other types and hashes that do not fit raise HubError; nothing is guessed. The digest of a
variant is the SHA-256 of the canonical JSON of its `files`, so that one line of the lock stands for every byte.

Version 2 carries `lock-id` (random, kept for the life of the lock), `serial` (grows with every change; the second it
was written, so that locks of two machines can be compared) and `expires`. Version 1 had none of them: it is read as
serial 0 that never expires, and the next `lz hub lock` writes version 2.

`parse` says what the bytes mean, not whether to trust them: that is `signing.read_lock`, which reads once.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from layerzero.files import write_whole
from layerzero_hub.errors import refuse
from layerzero_hub.names import (
    SHA256,
    check_commit,
    check_module_id,
    check_paths,
    check_repo_id,
    check_variant,
    fitting,
    strict_json,
)

LOCK_NAME: Final = "layerzero-hub.lock"
MAX_BYTES: Final = 16 * 2**20
_LOCK_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class LockedFile:
    """One file: its SHA-256 and its size."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class LockedVariant:
    """One build of a kernel: its id, the ops namespaces it may register, what it depends on, and its files."""

    name: str
    digest: str
    id: str
    ops_namespaces: tuple[str, ...]
    kernel_depends: tuple[tuple[str, int], ...]
    files: Mapping[str, LockedFile]

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "id": self.id,
            "ops-namespaces": list(self.ops_namespaces),
            "kernel-depends": [{"repo-id": repo, "version": version} for repo, version in self.kernel_depends],
            "files": {path: asdict(item) for path, item in sorted(self.files.items())},
        }


@dataclass(frozen=True, slots=True)
class LockedKernel:
    """One kernel at one commit, with the builds that were locked."""

    repo_id: str
    version: int
    commit: str
    variants: Mapping[str, LockedVariant]

    @property
    def key(self) -> tuple[str, int]:
        return self.repo_id, self.version

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.version}"

    def fitting(self) -> LockedVariant:
        """The locked build that fits this machine best; HUB_VARIANT_MISSING when none does."""
        return self.variants[fitting(self.repo_id, self.variants)]

    def to_json(self) -> dict[str, Any]:
        return {
            "repo-id": self.repo_id,
            "version": self.version,
            "commit": self.commit,
            "variants": {name: variant.to_json() for name, variant in sorted(self.variants.items())},
        }


@dataclass(frozen=True, slots=True)
class Lock:
    """The whole lock. `signed_by` is no part of it: the key whose signature the bytes it was read from bear."""

    endpoint: str
    kernels: tuple[LockedKernel, ...] = field(default=())
    serial: int = 0
    expires: str = ""
    lock_id: str = ""
    signed_by: str = field(default="", compare=False)

    @property
    def content(self) -> str:
        """`sha256:…` of everything in it: two locks of one serial are the same lock or one of them is forged."""
        return _digest(self.to_json())

    def check_current(self) -> None:
        if self.expires and datetime.datetime.now(datetime.UTC) >= _time(self.expires, "expires"):
            raise refuse("HUB_LOCK_EXPIRED", self.expires)

    def check_whole(self) -> None:
        """Raise HUB_LOCK_INCOMPLETE unless everything a locked kernel depends on is locked too."""
        there = {kernel.key for kernel in self.kernels}
        for kernel, variant in self.variants():
            for repo_id, version in variant.kernel_depends:
                if (repo_id, version) not in there:
                    raise refuse("HUB_LOCK_INCOMPLETE", str(kernel), f"{repo_id}@{version}")

    def find(self, repo_id: str, version: int | None = None) -> LockedKernel:
        """The locked kernel; HUB_NOT_LOCKED when there is none, HUB_LOCK_INVALID when a version must be named."""
        found = [k for k in self.kernels if k.repo_id == repo_id and version in (None, k.version)]
        if not found:
            raise refuse("HUB_NOT_LOCKED", repo_id if version is None else f"{repo_id}@{version}")
        if len(found) > 1:
            versions = ", ".join(str(kernel.version) for kernel in found)
            raise refuse("HUB_LOCK_INVALID", repo_id, f"versions {versions} are locked: name one")
        return found[0]

    def variants(self) -> Iterator[tuple[LockedKernel, LockedVariant]]:
        for kernel in self.kernels:
            for variant in kernel.variants.values():
                yield kernel, variant

    def to_json(self) -> dict[str, Any]:
        """As in the file; kernels sorted, so that equal content gives equal bytes."""
        kernels = [kernel.to_json() for kernel in sorted(self.kernels, key=lambda kernel: kernel.key)]
        if not self.lock_id:
            return {"lock-version": 1, "endpoint": self.endpoint, "kernels": kernels}
        head = {"lock-version": 2, "lock-id": self.lock_id, "serial": self.serial, "expires": self.expires or None}
        return {**head, "endpoint": self.endpoint, "kernels": kernels}


def digest_of(files: Mapping[str, LockedFile]) -> str:
    """`sha256:…` over the canonical JSON of the files."""
    return _digest({path: asdict(item) for path, item in files.items()})


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def read_bytes(path: Path) -> bytes:
    """What stands in the file, read once. Raises HUB_LOCK_MISSING or HUB_LOCK_INVALID."""
    try:
        # O_NONBLOCK: a FIFO of that name must not make us wait.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refuse("HUB_LOCK_INVALID", path.name, "no regular file")
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refuse("HUB_LOCK_MISSING", path.name) from None
    except OSError as error:
        raise refuse("HUB_LOCK_INVALID", path.name, error.strerror or str(error)) from None


def read(path: Path) -> Lock:
    """What the lock at `path` says, whoever wrote it. To act on a lock, `signing.read_lock`."""
    return parse(read_bytes(path))


def written(lock: Lock) -> bytes:
    """The lock as a file; equal locks give equal bytes."""
    return (json.dumps(lock.to_json(), indent=1, ensure_ascii=True) + "\n").encode("ascii")


def write(lock: Lock, path: Path) -> None:
    """Write the lock whole or not at all."""
    write_whole(path, written(lock).decode("ascii"))


def parse(raw: bytes) -> Lock:
    """The lock in these bytes; only HubError is raised, whatever the bytes."""
    data = strict_json(raw, "HUB_LOCK_INVALID", "file", MAX_BYTES)
    version = data.get("lock-version") if isinstance(data, dict) else None
    top = _fields(data, "file", _TOP[2] if version == 2 else _TOP[1])
    if isinstance(version, bool) or version not in _TOP:
        raise refuse("HUB_LOCK_INVALID", "lock-version", f"1 or 2 expected, not {str(version)[:40]}: lock again")
    kernels = tuple(_kernel(entry, f"kernels[{index}]") for index, entry in enumerate(top["kernels"]))
    seen: set[tuple[str, int]] = set()
    for kernel in kernels:
        if kernel.key in seen:
            raise refuse("HUB_LOCK_INVALID", str(kernel), "locked twice")
        seen.add(kernel.key)
    if version == 1:
        return Lock(top["endpoint"], kernels)
    if not _LOCK_ID.match(top["lock-id"]):
        raise refuse("HUB_LOCK_INVALID", "lock-id", "32 hex digits")
    if not 0 < top["serial"] < 2**53:
        raise refuse("HUB_LOCK_INVALID", "serial", "a number above 0")
    if top["expires"] is not None:
        _time(top["expires"], "expires")
    return Lock(top["endpoint"], kernels, top["serial"], top["expires"] or "", top["lock-id"])


def _time(text: str, where: str) -> datetime.datetime:
    try:
        found = datetime.datetime.strptime(text, _TIME)
        if found.strftime(_TIME) == text:
            return found.replace(tzinfo=datetime.UTC)
    except ValueError:
        pass
    raise refuse("HUB_LOCK_INVALID", where, "a time such as 2027-01-31T00:00:00Z")


def expiry(days: int) -> str:
    """The `expires` of a lock that is good for so many days from now."""
    now = datetime.datetime.now(datetime.UTC)
    return (now + datetime.timedelta(days=days)).strftime(_TIME)


_OPTIONAL_TEXT: Final = (str, type(None))
_FIRST: Final = {"lock-version": int, "endpoint": str, "kernels": list}
_TOP: Final[Mapping[int, Mapping[str, Any]]] = {
    1: _FIRST,
    2: {**_FIRST, "lock-id": str, "serial": int, "expires": _OPTIONAL_TEXT},
}


def _fields(data: Any, where: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise refuse("HUB_LOCK_INVALID", where, f"a mapping expected, not {type(data).__name__}")
    for key in data:
        if key not in wanted:
            raise refuse("HUB_LOCK_INVALID", f"{where}.{key}", "unknown key")
    for key, kind in wanted.items():
        if key not in data:
            raise refuse("HUB_LOCK_INVALID", f"{where}.{key}", "missing")
        if not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
            name = "text or null" if kind is _OPTIONAL_TEXT else kind.__name__
            raise refuse("HUB_LOCK_INVALID", f"{where}.{key}", f"{name} expected")
    return data


def _kernel(data: Any, where: str) -> LockedKernel:
    entry = _fields(data, where, {"repo-id": str, "version": int, "commit": str, "variants": dict})
    repo_id = check_repo_id(entry["repo-id"])
    if not 0 <= entry["version"] < 2**31:
        raise refuse("HUB_LOCK_INVALID", f"{where}.version", "a version from 0 up")
    if not entry["variants"]:
        raise refuse("HUB_LOCK_INVALID", f"{where}.variants", "at least one build")
    place = f"{where}.variants"
    variants = {name: parse_variant(name, item, f"{place}.{name}") for name, item in entry["variants"].items()}
    return LockedKernel(repo_id, entry["version"], check_commit(entry["commit"]), variants)


def parse_variant(name: str, data: Any, where: str) -> LockedVariant:
    """The build that stands under this name in a lock; only HubError is raised, whatever the data."""
    wanted = {"digest": str, "id": str, "ops-namespaces": list, "kernel-depends": list, "files": dict}
    entry = _fields(data, where, wanted)
    check_variant(name)
    check_paths(entry["files"])
    files = {path: _file(item, f"{where}.files") for path, item in entry["files"].items()}
    if "metadata.json" not in files:
        raise refuse("HUB_LOCK_INVALID", f"{where}.files", "metadata.json is missing")
    if not entry["id"].isidentifier() or not entry["id"].isascii():
        raise refuse("HUB_LOCK_INVALID", f"{where}.id", "a Python name expected")
    check_module_id(entry["id"])
    for space in entry["ops-namespaces"]:
        if not isinstance(space, str) or not space.isidentifier():
            raise refuse("HUB_LOCK_INVALID", f"{where}.ops-namespaces", "Python names expected")
    kinds, place = {"repo-id": str, "version": int}, f"{where}.kernel-depends"
    needed = [_fields(item, place, kinds) for item in entry["kernel-depends"]]
    depends = tuple((check_repo_id(item["repo-id"]), item["version"]) for item in needed)
    if entry["digest"] != digest_of(files):
        raise refuse("HUB_LOCK_STALE", where)
    return LockedVariant(name, entry["digest"], entry["id"], tuple(entry["ops-namespaces"]), depends, files)


def _file(data: Any, where: str) -> LockedFile:
    entry = _fields(data, where, {"sha256": str, "size": int})
    if not 0 <= entry["size"] < 2**48:
        raise refuse("HUB_LOCK_INVALID", f"{where}.size", "a size from 0 up")
    if not SHA256.match(entry["sha256"]):
        raise refuse("HUB_LOCK_INVALID", f"{where}.sha256", "64 hex digits expected")
    return LockedFile(entry["sha256"], entry["size"])
