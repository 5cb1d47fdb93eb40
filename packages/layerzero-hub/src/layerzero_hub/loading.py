"""Loading a locked build: policy, every byte, a free name, and only then its code. Works with the hub down."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import ModuleType

from layerzero_hub import fingerprint, honest, signing, source
from layerzero_hub.contents import Contents
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.fingerprint import Finding, Snapshot
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.metadata import check_id_free, check_locked, check_same, parse
from layerzero_hub.names import fitting
from layerzero_hub.policy import HubPolicy, discovered
from layerzero_hub.store import Store

_lock = threading.RLock()
_loaded: dict[str, ModuleType] = {}
_namespaces: set[str] = set()
"""Ops namespaces of the kernels loaded so far."""


def load(repo_id: str, version: int | None = None, *, policy: HubPolicy | None = None, digest: str = "") -> ModuleType:
    """The module of a locked kernel, verified now. Raises HubError before any code of the kernel runs, or after a
    kernel changed an existing op; then its digest is quarantined, since the process cannot be trusted any more.

    With `digest`, only that build: what was said about one build is not true of another.
    """
    policy = policy or discovered()
    lock = signing.read_lock(policy)
    if digest and choose(lock.find(repo_id, version)).digest != digest:
        raise refuse("HUB_LOCK_INVALID", repo_id, "locked anew since this process registered it: start it again")
    with _lock:
        return _load(repo_id, version, policy, lock)


def check(repo_id: str, version: int | None = None, *, policy: HubPolicy, lock: Lock | None = None) -> LockedVariant:
    """All checks that come before the import, on the kernel and what it depends on; the build that would be loaded."""
    lock = lock or signing.read_lock(policy)
    return _check(repo_id, version, policy, lock, "", ())


def choose(kernel: LockedKernel) -> LockedVariant:
    """The locked build that fits this machine best."""
    return kernel.variants[fitting(kernel.repo_id, kernel.variants)]


def _check(
    repo_id: str,
    version: int | None,
    policy: HubPolicy,
    lock: Lock,
    wanted_by: str,
    above: tuple[str, ...],
    opened: dict[str, Contents] | None = None,
) -> LockedVariant:
    """The checks; with `opened`, the verified bytes of each build that is not loaded yet come with them."""
    if os.environ.get("LOCAL_KERNELS"):
        raise refuse("HUB_LOCAL_OVERRIDE")
    policy.check_allowed(repo_id, wanted_by=wanted_by)
    policy.check_endpoint(lock.endpoint)
    signing.check_signed(lock, policy)
    variant = choose(lock.find(repo_id, version))
    policy.check_digest(variant.digest)
    store = Store(policy.store_path)
    store.check_quarantine(variant.digest)
    if repo_id in above:
        raise refuse("HUB_LOCK_INVALID", repo_id, "it depends on itself")
    if opened is None or variant.digest in _loaded:
        store.verify(variant)
        check_locked(store.variant_path(variant), variant)
    elif variant.digest not in opened:
        opened[variant.digest] = store.open(variant)
        check_same(parse(opened[variant.digest].files["metadata.json"], variant.name), variant)
    for needed, needed_version in variant.kernel_depends:
        _check(needed, needed_version, policy, lock, repo_id, (*above, repo_id), opened)
    return variant


def _load(repo_id: str, version: int | None, policy: HubPolicy, lock: Lock) -> ModuleType:
    opened: dict[str, Contents] = {}
    try:
        return _load_build(_check(repo_id, version, policy, lock, "", (), opened), policy, lock, opened)
    finally:
        for contents in opened.values():
            contents.close()


def _load_build(variant: LockedVariant, policy: HubPolicy, lock: Lock, opened: dict[str, Contents]) -> ModuleType:
    module = _loaded.get(variant.digest)
    if module is not None:
        return module
    needed = {
        repo_id: _load_build(choose(lock.find(repo_id, number)), policy, lock, opened)
        for repo_id, number in variant.kernel_depends
    }
    check_names_free(variant)
    # From here on code may hold on to the descriptors: they stay open as long as the process.
    contents = opened.pop(variant.digest)
    source.prepare()
    honest.import_for([contents])
    before = fingerprint.take()
    try:
        _validate(contents)
        module = source.import_build(contents, needed, functools.partial(_inner, variant.id, policy, lock))
    except HubError:
        raise
    except Exception as error:
        raise refuse("HUB_PROBE_FAILED", f"{type(error).__name__}: {error}") from error
    _judge(before, fingerprint.take(), variant, Store(policy.store_path))
    _loaded[variant.digest] = module
    _namespaces.update(variant.ops_namespaces)
    return module


def _inner(wanted_by: str, policy: HubPolicy, lock: Lock, repo_id: str, version: int | None) -> ModuleType:
    """A kernel that another one asks for in its code: allowed, locked and verified like any, or refused."""
    policy.check_allowed(repo_id, wanted_by=wanted_by)
    if version is None:
        raise refuse("HUB_NOT_LOCKED", repo_id, detail="a version, not a branch or a commit")
    with _lock:
        return _load(repo_id, version, policy, lock)


def _validate(contents: Contents) -> None:
    """What `kernels` asks of a build before it imports one: its Python dependencies, its architecture."""
    from kernels._rust import Metadata
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    metadata = Metadata.from_bytes(contents.files["metadata.json"])
    validator = AllValidator(validators=[*default_metadata_validators(), ArchValidator()])
    validator.validate_metadata(metadata=metadata, variant=contents.variant.name)


def check_names_free(variant: LockedVariant) -> None:
    """Raise when the id or an ops namespace is taken: a second TORCH_LIBRARY of one name ends the process."""
    check_id_free(variant.id)
    taken = fingerprint.namespaces()
    for space in variant.ops_namespaces:
        if space in taken:
            raise refuse("HUB_NAMESPACE_DUPLICATE", space, "something loaded in this process")


def _judge(before: Snapshot, after: Snapshot, variant: LockedVariant, store: Store) -> None:
    """Raise when the import stood in for what is not its own; the digest is then quarantined."""
    found = fingerprint.compare(before, after, variant.id, {*variant.ops_namespaces, *_namespaces})
    if not found:
        return
    guilty, sure = _without_others(found, before, after)
    if not guilty:
        return
    why = refuse(guilty[0].code, guilty[0].what, guilty[0].mark or ", ".join(variant.ops_namespaces) or "none")
    sys.modules.pop(variant.id, None)
    if sure:
        store.quarantine(variant.digest, str(why))
    raise why


def _without_others(found: tuple[Finding, ...], before: Snapshot, after: Snapshot) -> tuple[tuple[Finding, ...], bool]:
    """The findings that installed modules do not explain, and whether that could be asked.

    Modules that came meanwhile, by the kernel's import or by another thread's, are imported in a fresh process without
    the kernel: what happens there too, they did.
    """
    others = [name for name, one in after.modules.items() if name not in before.modules and source.id_of(one) is None]
    if not others:
        return found, True
    from layerzero_hub.probe import Prober

    try:
        with Prober() as prober:
            explained = prober.replay(others)
    except HubError:
        return found, False
    return tuple(one for one in found if one not in explained), True
