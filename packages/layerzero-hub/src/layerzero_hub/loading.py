"""Loading a locked build: policy, every byte, a free name, and only then its code. Works with the hub down."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from layerzero_hub import fingerprint, signing, source
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant, read
from layerzero_hub.metadata import check_id_free
from layerzero_hub.policy import HubPolicy, discovered
from layerzero_hub.store import Store

__all__ = ["Chosen", "check", "choose", "load", "loaded"]

_lock = threading.RLock()
_loaded: dict[str, ModuleType] = {}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A locked kernel and the build of it that fits this machine."""

    kernel: LockedKernel
    variant: LockedVariant


def load(repo_id: str, version: int | None = None, *, policy: HubPolicy | None = None) -> ModuleType:
    """The module of a locked kernel, verified now. Raises HubError before any code of the kernel runs, or after a
    kernel changed an existing op; then its digest is quarantined, since the process cannot be trusted any more.
    """
    policy = policy or discovered()
    lock = read(policy.lock_path)
    with _lock:
        return _load(repo_id, version, policy, lock, "", ())


def loaded() -> dict[str, ModuleType]:
    """Digest → module, of this process."""
    return dict(_loaded)


def check(repo_id: str, version: int | None = None, *, policy: HubPolicy, lock: Lock | None = None) -> Chosen:
    """All checks that come before the import, on the kernel and what it depends on; the build that would be loaded."""
    lock = lock or read(policy.lock_path)
    return _check(repo_id, version, policy, lock, "", ())


def choose(kernel: LockedKernel) -> LockedVariant:
    """The locked build that fits this machine best, by the rules of `kernels`."""
    from kernels.variants import parse_variant, resolve_variant

    names = []
    for name in kernel.variants:
        try:
            names.append(parse_variant(name))
        except ValueError:
            continue
    best, _ = resolve_variant(names)
    if best is None:
        raise refuse("HUB_VARIANT_MISSING", kernel.repo_id, ", ".join(sorted(kernel.variants)))
    return kernel.variants[best.variant_str]


def _check(
    repo_id: str, version: int | None, policy: HubPolicy, lock: Lock, wanted_by: str, above: tuple[str, ...]
) -> Chosen:
    if os.environ.get("LOCAL_KERNELS"):
        raise refuse("HUB_LOCAL_OVERRIDE")
    policy.check_allowed(repo_id, wanted_by=wanted_by)
    policy.check_endpoint(lock.endpoint)
    signing.check_lock(policy)
    kernel = lock.find(repo_id, version)
    variant = choose(kernel)
    policy.check_digest(variant.digest)
    store = Store(policy.store_path)
    if variant.digest in store.quarantined():
        raise refuse("HUB_REVOKED", variant.digest, detail="quarantined on this machine after doing harm")
    store.check_not_rolled_back(kernel, variant)
    store.verify(variant)
    if repo_id in above:
        raise refuse("HUB_LOCK_INVALID", repo_id, "it depends on itself")
    for needed, needed_version in variant.kernel_depends:
        _check(needed, needed_version, policy, lock, repo_id, (*above, repo_id))
    return Chosen(kernel, variant)


def _load(
    repo_id: str, version: int | None, policy: HubPolicy, lock: Lock, wanted_by: str, above: tuple[str, ...]
) -> ModuleType:
    chosen = _check(repo_id, version, policy, lock, wanted_by, above)
    variant = chosen.variant
    module = _loaded.get(variant.digest)
    if module is not None:
        return module
    needed = {
        dependency: _load(dependency, number, policy, lock, repo_id, (*above, repo_id))
        for dependency, number in variant.kernel_depends
    }
    check_names_free(variant)
    store = Store(policy.store_path)
    before = fingerprint.take()
    try:
        with _no_bytecode():
            module = _import(store, variant, needed)
    except HubError:
        raise
    except BaseException as error:
        sys.modules.pop(variant.id, None)
        if not isinstance(error, Exception):
            raise
        raise refuse("HUB_PROBE_FAILED", f"{type(error).__name__}: {error}") from error
    _judge(before, fingerprint.take(), variant, store)
    _loaded[variant.digest] = module
    return module


def check_names_free(variant: LockedVariant) -> None:
    """Raise when the id or an ops namespace is taken: a second TORCH_LIBRARY of one name ends the process."""
    check_id_free(variant.id)
    taken = fingerprint.namespaces()
    for space in variant.ops_namespaces:
        if space in taken:
            raise refuse("HUB_NAMESPACE_DUPLICATE", space, "something loaded in this process")


def _judge(before: Any, after: Any, variant: LockedVariant, store: Store) -> None:
    """Raise when the import changed an existing op or registered where it may not; the digest is then quarantined."""
    why: HubError | None = None
    different = fingerprint.changed(before, after)
    added = fingerprint.namespaces(frozenset(after) - frozenset(before))
    foreign = sorted(added - set(variant.ops_namespaces))
    if different:
        why = refuse("HUB_DISPATCHER_CHANGED", different[0])
    elif foreign:
        why = refuse("HUB_NAMESPACE_FOREIGN", foreign[0], ", ".join(variant.ops_namespaces) or "none")
    if why is not None:
        sys.modules.pop(variant.id, None)
        store.quarantine(variant.digest, str(why))
        raise why


def _import(store: Store, variant: LockedVariant, needed: dict[str, ModuleType]) -> ModuleType:
    """Import through `kernels`, from the store alone: its resolver knows one path and asks no hub."""
    from kernels._rust import Metadata
    from kernels.importer import _import_from_path
    from kernels.validate import AllValidator, ArchValidator, default_metadata_validators

    path = store.variant_path(variant)
    source.guard(path, variant)
    metadata = Metadata.read_from_file(path / "metadata.json")
    validator = AllValidator(validators=[*default_metadata_validators(), ArchValidator()])
    validator.validate_metadata(metadata=metadata, variant=variant.name)
    module: ModuleType = _import_from_path(path, deps=needed)
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Compiled files are read from and written to an empty private folder: a planted .pyc is never looked at."""
    with tempfile.TemporaryDirectory(prefix="layerzero-hub-") as folder:
        kept = sys.pycache_prefix, sys.dont_write_bytecode
        sys.pycache_prefix, sys.dont_write_bytecode = folder, True
        try:
            yield
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = kept
