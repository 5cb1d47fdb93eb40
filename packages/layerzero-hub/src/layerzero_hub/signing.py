"""Whether a lock may be acted on: read once, signature first, then everything else, always on the same bytes.

Signatures are OpenSSF model-signing with a local EC key: offline, no transparency log. The lock holds the hash of every
byte that may run, so a signature over it covers the store as well. Where the policy names `signing_keys`, a lock
without a signature by one of them is refused; without keys, a lock counts only where trusted settings name it.

An older lock is known by its serial, under the path it lies at and under the `lock-id` it carries (`Memory`); a machine
that never saw the newer one cannot know, which is what the lock's `expires` is for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.files import set_aside, write_whole
from layerzero_hub import lockfile
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.policy import HubPolicy
from layerzero_hub.store import locked, make_folders, write_json

_HISTORY = "history.json"


def signature_path(lock: Path) -> Path:
    """Where the signature of a lock lies: beside it."""
    return lock.with_name(lock.name + ".sig")


# -- reading --------------------------------------------------------------------------------------------------------
def read_lock(policy: HubPolicy, *, allow_rollback: bool = False) -> Lock:
    """The lock in force. Its file is read once: the bytes that were verified are the ones that are parsed and used.

    Raises HUB_SIGNATURE_…, HUB_LOCK_UNNAMED, what `lockfile.parse` raises, HUB_LOCK_EXPIRED, HUB_ROLLBACK.
    """
    return _trusted(lockfile.read_bytes(policy.lock_path), policy, allow_rollback=allow_rollback)


def read_known(policy: HubPolicy, *, allow_rollback: bool = False) -> Lock | None:
    """The lock that `lz hub lock` builds on; None when there is none. It may be over, never badly signed.

    Bytes that `lz hub lock` wrote on this machine itself need no signature yet: two kernels may be locked before one
    signature is made.
    """
    if not policy.lock_path.exists():
        return None
    raw = lockfile.read_bytes(policy.lock_path)
    if Memory(policy).is_ours(raw):
        return lockfile.parse(raw)
    return _trusted(raw, policy, allow_rollback=allow_rollback, allow_expired=True)


def check_signed(lock: Lock, policy: HubPolicy) -> None:
    """Raise when the policy asks for a signature and this lock was not read through `read_lock`."""
    if policy.signing_keys and lock.signed_by not in policy.signing_keys:
        raise refuse("HUB_SIGNATURE_MISSING", policy.lock_path.name)


def _trusted(raw: bytes, policy: HubPolicy, *, allow_rollback: bool, allow_expired: bool = False) -> Lock:
    signed_by = _signer(raw, policy.lock_path, policy)
    if not signed_by and not policy.lock:
        raise refuse("HUB_LOCK_UNNAMED", policy.lock_path.name)
    lock = replace(lockfile.parse(raw), signed_by=signed_by)
    policy.check_endpoint(lock.endpoint)
    if not allow_expired:
        lock.check_current()
    if not allow_rollback:
        Memory(policy).check(lock)
    return lock


def _signer(raw: bytes, path: Path, policy: HubPolicy) -> str:
    """The key of the policy that signed these bytes; empty when the policy names no keys."""
    if not policy.signing_keys:
        return ""
    try:
        signature = signature_path(path).read_bytes()
    except OSError:
        raise refuse("HUB_SIGNATURE_MISSING", path.name) from None
    vendor, verdicts = _vendor(), []
    with _private_copy(path.name, raw, signature) as (lock, copied):
        for key in policy.signing_keys:
            verdict = _verify(vendor, lock, copied, Path(key))
            if not verdict:
                return key
            verdicts.append(verdict)
    if all("Key mismatch" in verdict for verdict in verdicts):
        raise refuse("HUB_SIGNATURE_FOREIGN", path.name, detail=verdicts[-1])
    raise refuse("HUB_SIGNATURE_BAD", path.name, verdicts[-1])


# -- signing --------------------------------------------------------------------------------------------------------
def sign_lock(policy: HubPolicy, private_key: Path, *, raw: bytes | None = None, password: str | None = None) -> Path:
    """Sign the policy's lock with a private EC key (PEM); returns the signature's path.

    `raw` are the bytes that somebody looked at and wants signed, else those of the file. Only a lock that is whole and
    that this policy would accept is signed: the signature vouches for it everywhere.
    """
    path = policy.lock_path
    raw = lockfile.read_bytes(path) if raw is None else raw
    lock = checked_for_signing(lockfile.parse(raw), policy)
    vendor = _vendor()
    secret = password.encode() if password else None
    with _key(private_key):
        config = vendor.signing.Config().use_elliptic_key_signer(private_key=private_key, password=secret)
    target = signature_path(path)
    with writing(target.name), _private_copy(path.name, raw, b"") as (copy, made):
        config.set_hashing_config(_hashing(vendor, copy)).sign(copy, made)
        write_whole(target, made.read_text(encoding="utf-8"))
    Memory(policy).remember_signed(lock)
    return target


def checked_for_signing(lock: Lock, policy: HubPolicy) -> Lock:
    """Raise unless the lock is whole, current and all that is in it is allowed."""
    if not lock.serial:
        raise refuse("HUB_LOCK_INVALID", "lock-version", "version 1 has no serial: run `lz hub lock` once, then sign")
    lock.check_current()
    lock.check_whole()
    policy.check_endpoint(lock.endpoint)
    for kernel, variant in lock.variants():
        policy.check_allowed(kernel.repo_id)
        policy.check_digest(variant.digest)
    Memory(policy).check(lock)
    return lock


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two locks; `before` or `after` is empty where there is nothing."""

    what: str
    before: str
    after: str


def changes(old: Lock | None, new: Lock) -> tuple[Change, ...]:
    """What is different in `new`: endpoint, serial, expiry, commits, builds; every build when there is no old lock."""
    before, after = (_facts(old) if old else {}), _facts(new)
    both = (Change(what, before.get(what, ""), after.get(what, "")) for what in sorted({*before, *after}))
    return tuple(change for change in both if change.before != change.after)


def _facts(lock: Lock) -> dict[str, str]:
    facts = {"endpoint": lock.endpoint, "serial": str(lock.serial), "expires": lock.expires or "never"}
    for kernel, variant in lock.variants():
        facts[f"{kernel} commit"] = kernel.commit
        build = f"{kernel} {variant.name}"
        facts[build] = variant.digest
        facts[f"{build} module"] = variant.id
        facts[f"{build} ops"] = ", ".join(variant.ops_namespaces) or "none"
        if variant.kernel_depends:
            facts[f"{build} depends on"] = ", ".join(f"{repo}@{number}" for repo, number in variant.kernel_depends)
    return facts


# -- what this machine remembers ------------------------------------------------------------------------------------
class Memory:
    """What this machine has seen of locks: how new the newest was, what was signed last, what it wrote itself.

    `history.json` in the store, beside the builds. It changes only after a lock was written, signed or installed whole,
    so that a step that fails half-way leaves the lock in force as it was.
    """

    def __init__(self, policy: HubPolicy) -> None:
        self.root = policy.store_path
        self.path = os.path.realpath(policy.lock_path)

    def check(self, lock: Lock) -> None:
        """Raise HUB_ROLLBACK for a lock older than one seen here, HUB_LOCK_INVALID for another of the same serial."""
        for seen in self._seen(lock.lock_id):
            if lock.serial < seen["serial"]:
                raise refuse("HUB_ROLLBACK", f"serial {lock.serial}", f"serial {seen['serial']}")
            if lock.serial and lock.serial == seen["serial"] and lock.content != seen["content"]:
                raise refuse("HUB_LOCK_INVALID", "serial", f"another lock of serial {lock.serial} was seen here")

    def newest(self, lock_id: str) -> int:
        """The highest serial seen at the policy's path or of this lock; 0 when there was none."""
        return max((seen["serial"] for seen in self._seen(lock_id)), default=0)

    def remember(self, lock: Lock, *, ours: bool = False) -> None:
        """Note that this lock is in force; `ours` when this machine made it from what it saw at the hub."""

        def change(data: dict[str, Any]) -> None:
            for key in self._keys(lock.lock_id):
                data.setdefault("locks", {})[key] = {"serial": lock.serial, "content": lock.content}
            if ours:
                data.setdefault("ours", {})[self.path] = hashlib.sha256(lockfile.written(lock)).hexdigest()
            for kernel, variant in lock.variants():
                key = f"{kernel}/{variant.name}"
                data[key] = [one for one in data.get(key, []) if one != variant.digest] + [variant.digest]

        self._change(change)

    def check_build(self, kernel: LockedKernel, variant: LockedVariant) -> None:
        """Raise HUB_ROLLBACK when the hub offers a build that was replaced by a newer one before."""
        seen = self._read().get(f"{kernel}/{variant.name}", [])
        if variant.digest in seen and seen[-1] != variant.digest:
            raise refuse("HUB_ROLLBACK", variant.digest, seen[-1])

    def is_ours(self, raw: bytes) -> bool:
        """Whether `lz hub lock` wrote these very bytes on this machine."""
        return bool(self._read().get("ours", {}).get(self.path) == hashlib.sha256(raw).hexdigest())

    def remember_signed(self, lock: Lock) -> None:
        """Keep the lock that was signed, to show later what changed since."""
        self._change(lambda data: data.setdefault("signed", {}).update({self.path: lock.to_json()}))

    def last_signed(self) -> Lock | None:
        kept = self._read().get("signed", {}).get(self.path)
        try:
            return lockfile.parse(json.dumps(kept).encode()) if kept else None
        except HubError:
            return None  # kept by a version that wrote locks otherwise

    def other_locks(self) -> list[Path]:
        """Where other locks were seen that use this store, and still lie."""
        seen = {key.removeprefix("path:") for key in self._read().get("locks", {}) if key.startswith("path:")}
        return [Path(path) for path in sorted(seen - {self.path}) if os.path.exists(path)]

    def _keys(self, lock_id: str) -> tuple[str, ...]:
        return (f"path:{self.path}", f"lock:{lock_id}") if lock_id else (f"path:{self.path}",)

    def _seen(self, lock_id: str) -> list[dict[str, Any]]:
        known = self._read().get("locks", {})
        return [known[key] for key in self._keys(lock_id) if key in known]

    def _read(self) -> dict[str, Any]:
        path = self.root / _HISTORY
        try:
            data = json.loads(path.read_bytes())
            if _is_sound(data):
                return dict(data)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:  # a disk that fails is no reason to forget
            raise refuse("HUB_STORE_KIND", _HISTORY, f"not readable: {error.strerror}") from None
        except (ValueError, RecursionError):
            pass
        with contextlib.suppress(OSError):
            set_aside(path)  # damaged: kept for whoever wants to look, and begun anew
        return {}

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Write what `change` makes of the memory; nothing when it stays as it is, for a store may be read-only."""
        same = self._read()
        change(same)
        if same == self._read():
            return
        with writing(_HISTORY):
            make_folders(self.root, 0o755)
            with locked(self.root, "history"):
                data = self._read()
                change(data)
                write_json(self.root / _HISTORY, data, os.stat(self.root).st_mode)


def _is_sound(data: Any) -> bool:
    if not isinstance(data, dict):
        return False
    if not all(isinstance(data.get(key, {}), dict) for key in ("locks", "ours", "signed")):
        return False
    seen = data.get("locks", {}).values()
    return all(isinstance(one, dict) and type(one.get("serial")) is int and "content" in one for one in seen)


# -- details --------------------------------------------------------------------------------------------------------
@contextmanager
def _private_copy(name: str, raw: bytes, signature: bytes) -> Iterator[tuple[Path, Path]]:
    """The library reads files: it gets these bytes in a folder nobody else can write to."""
    with tempfile.TemporaryDirectory(prefix="layerzero-hub-") as folder:
        lock = Path(folder, name)
        lock.write_bytes(raw)
        copied = signature_path(lock)
        if signature:
            copied.write_bytes(signature)
        yield lock, copied


def _verify(vendor: Any, lock: Path, signature: Path, key: Path) -> str:
    """Empty when the signature holds, else why not."""
    with _key(key):
        config = vendor.verifying.Config().use_elliptic_key_verifier(public_key=key)
    try:
        config.set_hashing_config(_hashing(vendor, lock)).verify(lock, signature)
    except Exception as error:  # the library raises many kinds; all mean: not verified
        return f"{type(error).__name__}: {error}" or "not verified"
    return ""


@contextmanager
def _key(path: Path) -> Iterator[None]:
    """What goes wrong while a key is read, as HUB_KEY_INVALID."""
    try:
        yield
    except FileNotFoundError:
        raise refuse("HUB_KEY_INVALID", path.name, "there is no such file") from None
    except (TypeError, ValueError, AttributeError, OSError) as error:
        why = f"no EC key in PEM form ({type(error).__name__})"
        if "assword" in str(error):
            why = "it is encrypted: give --password-file, or a key without a password"
        raise refuse("HUB_KEY_INVALID", path.name, why) from None


def _hashing(vendor: Any, lock: Path) -> Any:
    hashing = vendor.hashing
    # Its default leaves files below .git and .gitignore out, which is for models and not for us.
    return hashing.Config().set_ignored_paths(paths=[signature_path(lock)], ignore_git_paths=False)


def _vendor() -> Any:
    try:
        import model_signing
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise BackendNotAvailableError(
            f"signatures need model-signing: {error}", hint="pip install 'layerzero-hub[signing]'"
        ) from None
    return model_signing
