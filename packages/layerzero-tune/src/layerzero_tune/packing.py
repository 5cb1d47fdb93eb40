"""Warm starts that travel: the compiled artifacts of a manifest in one file, and installing them on another machine.

A pack is a tar file. Its first member, `pack.json`, names the machine it was made for (device, driver, torch, vendor
libraries), the artifacts, and every file with its size and sha256; a hash covers all of that, and a signature may cover
the hash, as with dispatch tables. What is in a pack is code: each file is checked while it is copied into a folder
beside its place, and nothing is installed before everything has been checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any

from layerzero import env
from layerzero.errors import ConfigurationError, DispatchTableError, InvalidInputError
from layerzero.jit import cache as jit_cache
from layerzero.jit.index import Index
from layerzero.model.artifact import Artifact
from layerzero.model.device import DeviceSpec
from layerzero.model.dispatch_table import Hardware
from layerzero.plugin import artifacts
from layerzero.registry.kinds import digest as digest_of
from layerzero.runtime.state import state
from layerzero.startup.warm import Warmup
from layerzero.tables.file import hardware_of
from layerzero.tables.signing import sign, verify

FORMAT = "layerzero-artifacts/1"
MAX_BYTES = 16 << 30
MAX_FILES = 200_000
_MAX_HEAD = 64 << 20
_HEAD = "pack.json"
_SIGNED = "warm start"
_MAX_TEXT = 1 << 20  # of a file that may hold the path of its folder
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack holds."""

    artifacts: tuple[Artifact, ...]
    files: int
    bytes: int
    content_hash: str
    signed: bool


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a pack; `moved`: it holds the path of its folder, which is another one elsewhere."""

    sha256: str
    size: int
    mode: int
    mtime: int
    moved: bool = False


def _refused(code: str, value: object, limit: object = None) -> ConfigurationError:
    return ConfigurationError(code=code, value=value, limit=limit)


# -- packing -------------------------------------------------------------------------------------
def pack(warmed: Warmup, path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None) -> Packed:
    """Write what a warm-up has made ready into one file, for machines like this one; signed where a `key` is given."""
    artifacts = {item.artifact for item in warmed.outcomes if item.reason is None}
    devices = {item.context.device for item in warmed.items}
    if len(devices) != 1:
        raise InvalidInputError(code="VALUE_INVALID", value=f"calls for {len(devices)} devices", limit="one device")
    path, hardware = Path(path), hardware_of(devices.pop())
    entries = [entry for entry in Index(_prepared()).entries() if entry.artifact in artifacts and not entry.error]
    foreign = [entry.kernel_id for entry in entries if entry.values[1] != hardware.signature]
    if foreign or not entries:
        what = ", ".join(foreign) or "none of these calls has a compiled artifact"
        raise _refused("PACK_INVALID", what, f"artifacts compiled for {hardware.device}")
    # Names are kept up to a bound, and none of what was there already: then everything in those folders goes along.
    known = all(0 < len(entry.evidence) < jit_cache.EVIDENCE for entry in entries)
    roots = sorted({Path(name) for entry in entries for name in entry.evidence}) if known else []
    places = jit_cache.places()
    deep = [places[name] for name in jit_cache.DEEP_FOLDERS.values()]
    found = dict(_files([*roots, *deep] if known else list(places.values()), places))
    head: dict[str, Any] = {
        "format": FORMAT,
        "hardware": {**asdict(hardware), "backends": dict(hardware.backends)},
        "artifacts": [
            {
                "kernel_id": entry.kernel_id,
                "values": list(entry.values),
                "evidence": [named for name in entry.evidence if (named := _named(Path(name), places))],
                "seconds": entry.seconds,
            }
            for entry in entries
        ],
        "files": {name: asdict(_described(name, source, places)) for name, source in found.items()},
    }
    digest = digest_of(head)
    signature = None if key is None else sign(digest, Path(key), _SIGNED)
    text = json.dumps({**head, "content_hash": digest, "signature": signature}).encode()
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with tarfile.open(temp, "w", format=tarfile.PAX_FORMAT) as tar:
            _put(tar, _HEAD, text)
            for name, source in found.items():
                _put(tar, name, _content(name, source, places)[0])
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    size = sum(item["size"] for item in head["files"].values())
    return Packed(tuple(entry.artifact for entry in entries), len(found), size, digest, signature is not None)


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, BytesIO(data))


def _files(roots: list[Path], places: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Plain files at and below these roots, by their names in a pack; what is on its way to its name is left out."""
    for root in roots:
        walked = os.walk(root) if root.is_dir() else [(str(root.parent), [], [root.name])]
        for place, folders, names in walked:
            folders[:] = [name for name in folders if not jit_cache.is_passing(name)]
            for name in sorted(names):
                path = Path(place, name)
                known = _named(path, places)
                if known and not jit_cache.is_passing(name) and stat.S_ISREG(path.lstat().st_mode):
                    yield known, path


def _named(path: Path, places: Mapping[str, Path]) -> str:
    for name, place in places.items():
        with contextlib.suppress(ValueError):
            return str(PurePosixPath(name, path.relative_to(place)))
    return ""


def _token(name: str) -> bytes:
    return f"@layerzero:{name.partition('/')[0]}@".encode()


def _content(name: str, path: Path, places: Mapping[str, Path]) -> tuple[bytes, bool]:
    """A file's bytes, with a word in place of the path of its folder (Triton writes that into its groups)."""
    data = path.read_bytes()
    here = str(places[name.partition("/")[0]]).encode()
    if len(data) > _MAX_TEXT or here not in data or b"\0" in data:
        return data, False
    return data.replace(here, _token(name)), True


def _described(name: str, path: Path, places: Mapping[str, Path]) -> _File:
    data, moved = _content(name, path, places)
    state = path.stat()
    mode = 0o700 if state.st_mode & 0o100 else 0o600
    return _File(hashlib.sha256(data).hexdigest(), len(data), mode, int(state.st_mtime), moved)


# -- unpacking -----------------------------------------------------------------------------------
def unpack(path: str | os.PathLike[str], *, key: str | os.PathLike[str] | None = None, device: Any = None) -> Packed:
    """Check such a file and install what it holds, whole or not at all; its artifacts are ready from now on.

    With a `key` (default: LAYERZERO_TABLE_KEY) a pack that is not signed with it is refused. Raises ConfigurationError
    with a PACK_* reason for one that is damaged, unsigned, unsafe, or made for another device, driver or version of a
    library.
    """
    trusted, where = env.read().table_key if key is None else key, DeviceSpec.detect(device)
    folder = _prepared()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise _refused("PACK_TOO_LARGE", f"{size} bytes", f"{MAX_BYTES} bytes")
            with tarfile.open(fileobj=file, mode="r|") as tar:
                found = _unpacked(tar, folder, where, None if trusted is None else Path(trusted))
    except FileNotFoundError:
        raise _refused("CONFIG_FILE_MISSING", str(path)) from None
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise _refused("PACK_INVALID", f"{type(error).__name__}: {error}") from None
    if state.loaded:
        with state.changing():
            state.publish(ready=state.world.ready | frozenset(found.artifacts))
    return found


def _unpacked(tar: tarfile.TarFile, folder: Path, device: DeviceSpec, key: Path | None) -> Packed:
    first = tar.next()
    if first is None or first.name != _HEAD or not first.isreg() or first.size > _MAX_HEAD:
        raise _refused("PACK_INVALID", f"it does not begin with {_HEAD}")
    head = _read_head(_stream(tar, first).read())
    digest = digest_of({name: head[name] for name in ("format", "hardware", "artifacts", "files")})
    if digest != head["content_hash"]:
        raise _refused("PACK_HASH_MISMATCH", _HEAD)
    if key is not None:
        try:
            verify(digest, head["signature"], key, _SIGNED)
        except DispatchTableError as error:
            if error.reasons[0].code != "PLAN_SIGNATURE_INVALID":
                raise
            raise _refused("PACK_SIGNATURE_INVALID", error.reasons[0].value) from None
    _fits(head["hardware"], hardware_of(device))
    places = jit_cache.places()
    files = _checked_files(head["files"], places)
    staging = folder / f"tmp-unpacking-{uuid.uuid4().hex}"
    staging.mkdir(mode=0o700)
    try:
        _stage(tar, files, staging, places)
        _install(files, staging, places)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    index = Index(folder)
    found: list[Artifact] = []
    for item in head["artifacts"]:
        found.append((item["kernel_id"], tuple(item["values"])))
        evidence = [str(_place(name, places)) for name in item["evidence"]]
        index.add(found[-1], evidence=evidence, seconds=item["seconds"])
    return Packed(tuple(found), len(files), sum(item.size for item in files.values()), digest, key is not None)


def _read_head(data: bytes) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads(data)
        if head["format"] != FORMAT:
            raise _refused("SCHEMA_VERSION_UNKNOWN", str(head["format"])[:80], FORMAT)
        machine = head["hardware"]
        words = [machine["signature"], machine["device"], head["content_hash"], *machine["backends"].values()]
        for item in head["artifacts"]:
            words += [item["kernel_id"], *item["values"], *item["evidence"]]
            float(item["seconds"])
        if not all(isinstance(word, str) for word in words) or not isinstance(head["files"], dict):
            raise ValueError("a field of the wrong type")
        return head
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refused("PACK_INVALID", f"{_HEAD}: {type(error).__name__}: {error}") from None


def _fits(made: Mapping[str, Any], here: Hardware) -> None:
    """Refuse artifacts of another device, driver or version of a library."""
    if made["signature"] == here.signature:
        return
    if made["device"] != here.device:
        raise _refused("PACK_DEVICE_MISMATCH", here.device, made["device"])
    if made["driver"] != here.driver:
        raise _refused("PACK_DRIVER_MISMATCH", here.driver or "none", made["driver"] or "none")
    theirs, ours = {"torch": made["torch"], **made["backends"]}, {"torch": here.torch, **dict(here.backends)}
    differ = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
    if not differ:  # what else the signature covers: instructions, memory, toolkit
        raise _refused("PACK_DEVICE_MISMATCH", f"{here.device} ({here.signature})", made["signature"])
    shown = [", ".join(f"{name} {side.get(name, 'missing')}" for name in differ) for side in (ours, theirs)]
    raise _refused("PACK_VERSIONS_MISMATCH", *shown)


def _checked_files(given: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, _File]:
    try:
        files = {name: _File(**row) for name, row in given.items()}
        total = sum(item.size for item in files.values())
        bad = [name for name, item in files.items() if item.size < 0 or item.mode not in (0o600, 0o700)]
    except TypeError as error:
        raise _refused("PACK_INVALID", f"{_HEAD}: {error}") from None
    if bad:
        raise _refused("PACK_INVALID", f"{bad[0][:80]} has an impossible size or mode")
    if total > MAX_BYTES or len(files) > MAX_FILES:
        limit = f"{MAX_BYTES} bytes, {MAX_FILES} files"
        raise _refused("PACK_TOO_LARGE", f"{total} bytes in {len(files)} files", limit)
    for name in files:
        _place(name, places)
    return files


def _place(name: str, places: Mapping[str, Path]) -> Path:
    """Where a file of a pack goes; a name that leaves our folders is refused."""
    first, *rest = name.split("/")
    if first not in places or not rest or any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in rest):
        raise _refused("PACK_PATH_UNSAFE", name[:200])
    return places[first].joinpath(*rest)


def _stream(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    found = tar.extractfile(member)
    assert found is not None
    return found


def _stage(tar: tarfile.TarFile, files: Mapping[str, _File], staging: Path, places: Mapping[str, Path]) -> None:
    """Copy every file beside its place, checking it on the way."""
    left = dict(files)
    while (member := tar.next()) is not None:
        _place(member.name, places)
        if not member.isreg():
            raise _refused("PACK_LINK", member.name[:200])
        told = left.pop(member.name, None)
        if told is None:
            raise _refused("PACK_INVALID", f"{member.name[:200]} is not named in {_HEAD}, or comes twice")
        if member.size != told.size:
            raise _refused("PACK_HASH_MISMATCH", f"{member.name[:200]}: {member.size} bytes, not {told.size}")
        copied = staging / member.name
        copied.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest, source = hashlib.sha256(), _stream(tar, member)
        with open(os.open(copied, os.O_WRONLY | os.O_CREAT | os.O_EXCL, told.mode), "wb") as file:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != told.sha256:
            raise _refused("PACK_HASH_MISMATCH", member.name[:200])
        if told.moved:
            here = str(places[member.name.partition("/")[0]]).encode()
            copied.write_bytes(copied.read_bytes().replace(_token(member.name), here))
        os.utime(copied, (told.mtime, told.mtime))  # build systems compare these
    if left:
        raise _refused("PACK_INVALID", f"{len(left)} files are missing, {min(left)[:200]} first")


def _install(files: Mapping[str, _File], staging: Path, places: Mapping[str, Path]) -> None:
    """Move the files to their places; what is there stays. When one cannot be moved, those before it go again."""
    moved: list[Path] = []
    try:
        for name in sorted(files, key=lambda name: (name.endswith(".json"), name)):  # lists of files come last
            place = _place(name, places)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.path.lexists(place):
                shutil.move(staging / name, place)
                moved.append(place)
    except OSError as error:
        for place in moved:
            place.unlink(missing_ok=True)
        raise _refused("PACK_NOT_INSTALLED", f"{error.strerror}: {error.filename}") from None


def _prepared() -> Path:
    folder = jit_cache.prepare()
    if folder is None:
        raise _refused("CONFIG_INVALID", str(artifacts.cache_folder()), "your own folder, mode 0700")
    for place in jit_cache.places().values():
        if (why := artifacts.distrust(place)) is not None:
            raise ConfigurationError(reasons=(why,))
    return folder
