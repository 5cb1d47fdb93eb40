"""Whether a lock may be acted on: read once, signature first, then everything else, always on the same bytes.

Signatures are OpenSSF model-signing with a local EC key: offline, no transparency log. The lock holds the hash of every
byte that may run, so a signature over it covers the store as well. Where the policy names `signing_keys`, a lock
without a signature by one of them is refused; without keys, a lock counts only where trusted settings name it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.files import write_whole
from layerzero_hub import lockfile
from layerzero_hub.errors import refuse, writing
from layerzero_hub.lockfile import Lock
from layerzero_hub.memory import Memory
from layerzero_hub.policy import HubPolicy


def signature_path(lock: Path) -> Path:
    """Where the signature of a lock lies: beside it."""
    return lock.with_name(lock.name + ".sig")


# -- reading --------------------------------------------------------------------------------------------------------
def read_lock(policy: HubPolicy, *, allow_rollback: bool = False, allow_expired: bool = False) -> Lock:
    """The lock in force. Its file is read once: the bytes that were verified are the ones that are parsed and used.

    Raises HUB_SIGNATURE_…, HUB_LOCK_UNNAMED, what `lockfile.parse` raises, HUB_LOCK_EXPIRED, HUB_ROLLBACK.
    """
    raw = lockfile.read_bytes(policy.lock_path)
    return _trusted(raw, policy, allow_rollback=allow_rollback, allow_expired=allow_expired)


def read_known(policy: HubPolicy, *, allow_rollback: bool = False) -> Lock | None:
    """The lock that `lz hub lock` builds on; None when there is none. It may be over, never badly signed.

    Bytes that `lz hub lock` wrote on this machine itself need no signature yet: two kernels may be locked before one
    signature is made.
    """
    if not policy.lock_path.exists():
        return None
    raw = lockfile.read_bytes(policy.lock_path)
    if Memory(policy.store_path).is_ours(raw, policy.lock_path):
        return lockfile.parse(raw)
    return _trusted(raw, policy, allow_rollback=allow_rollback, allow_expired=True)


def check_signed(lock: Lock, policy: HubPolicy) -> None:
    """Raise when the policy asks for a signature and this lock was not read through `read_lock`."""
    if policy.signing_keys and lock.signed_by not in policy.signing_keys:
        raise refuse("HUB_SIGNATURE_MISSING", policy.lock_path.name)


def _trusted(raw: bytes, policy: HubPolicy, *, allow_rollback: bool, allow_expired: bool) -> Lock:
    path = policy.lock_path
    signed_by = _signer(raw, path, policy)
    if not signed_by and not policy.lock:
        raise refuse("HUB_LOCK_UNNAMED", path.name)
    lock = replace(lockfile.parse(raw), signed_by=signed_by)
    policy.check_endpoint(lock.endpoint)
    if not allow_expired:
        lock.check_current()
    if not allow_rollback:
        Memory(policy.store_path).check(lock, path)
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
    if raw is None:
        raw = lockfile.read_bytes(path)
    lock = checked_for_signing(lockfile.parse(raw), policy)
    vendor = _vendor()
    secret = password.encode() if password else None
    with _key(private_key):
        config = vendor.signing.Config().use_elliptic_key_signer(private_key=private_key, password=secret)
    target = signature_path(path)
    with writing(target.name), _private_copy(path.name, raw, b"") as (copy, made):
        config.set_hashing_config(_hashing(vendor, copy)).sign(copy, made)
        signature = made.read_text(encoding="utf-8")
        write_whole(target, signature)
    Memory(policy.store_path).remember_signed(lock, path)
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
    Memory(policy.store_path).check(lock, policy.lock_path)
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
    found = []
    for what in sorted({*before, *after}):
        one, two = before.get(what, ""), after.get(what, "")
        if one != two:
            found.append(Change(what, one, two))
    return tuple(found)


def _facts(lock: Lock) -> dict[str, str]:
    facts = {"endpoint": lock.endpoint, "serial": str(lock.serial), "expires": lock.expires or "never"}
    for kernel in lock.kernels:
        name = f"{kernel.repo_id}@{kernel.version}"
        facts[f"{name} commit"] = kernel.commit
        for variant in kernel.variants.values():
            facts[f"{name} {variant.name}"] = variant.digest
            facts[f"{name} {variant.name} module"] = variant.id
            facts[f"{name} {variant.name} ops"] = ", ".join(variant.ops_namespaces) or "none"
            needs = ", ".join(f"{repo}@{number}" for repo, number in variant.kernel_depends)
            if needs:
                facts[f"{name} {variant.name} depends on"] = needs
    return facts


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
