"""Loading a locked build: policy, every byte, a free name, and only then its code. Works with the hub down."""

from __future__ import annotations

import functools
import os
import sys
import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from layerzero_hub import fingerprint, signing, source
from layerzero_hub.contents import Contents
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.fingerprint import Finding, Snapshot
from layerzero_hub.lockfile import Lock, LockedVariant
from layerzero_hub.metadata import check_id_free, check_locked, check_same, parse
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
    if digest and lock.find(repo_id, version).fitting().digest != digest:
        raise refuse("HUB_LOCK_INVALID", repo_id, "locked anew since this process registered it: start it again")
    return _Loading(policy, lock).load(repo_id, version)


@dataclass(frozen=True)
class LockedLayer:
    """A layer of a locked kernel for `kernels.use_kernel_mapping`, so that `kernelize` takes the verified one.

    mapping = {"RMSNorm": {"cpu": LockedLayer("org/fast-norm", "RMSNorm")}}
    """

    repo_id: str
    layer_name: str
    version: int | None = field(default=None, kw_only=True)
    policy: HubPolicy | None = field(default=None, kw_only=True, hash=False)

    def load(self) -> type[Any]:
        """The layer's class, from the verified kernel's `layers`."""
        module = load(self.repo_id, self.version, policy=self.policy)
        layer = getattr(getattr(module, "layers", None), self.layer_name, None)
        if not isinstance(layer, type):
            raise refuse("HUB_METADATA_INVALID", self.repo_id, f"no layer {self.layer_name}")
        return layer

    def __str__(self) -> str:
        return f"locked {self.repo_id}, layer {self.layer_name}"


class _Loading:
    """One kernel on its way in, and what it depends on: the verified bytes of each build that is not loaded yet."""

    def __init__(self, policy: HubPolicy, lock: Lock) -> None:
        self.policy, self.lock = policy, lock
        self.store = Store(policy.store_path)
        self.opened: dict[str, Contents] = {}

    def load(self, repo_id: str, version: int | None) -> ModuleType:
        with _lock:
            try:
                return self._import(self._check(repo_id, version, "", ()))
            finally:
                while self.opened:
                    self.opened.popitem()[1].close()

    def _check(self, repo_id: str, version: int | None, wanted_by: str, above: tuple[str, ...]) -> LockedVariant:
        """All checks that come before the import, on the kernel and what it depends on; the build to be loaded."""
        if os.environ.get("LOCAL_KERNELS"):
            raise refuse("HUB_LOCAL_OVERRIDE")
        self.policy.check_allowed(repo_id, wanted_by=wanted_by)
        self.policy.check_endpoint(self.lock.endpoint)
        signing.check_signed(self.lock, self.policy)
        variant = self.lock.find(repo_id, version).fitting()
        self.policy.check_digest(variant.digest)
        self.store.check_quarantine(variant.digest)
        if repo_id in above:
            raise refuse("HUB_LOCK_INVALID", repo_id, "it depends on itself")
        if variant.digest in _loaded:
            self.store.verify(variant)
            check_locked(self.store.variant_path(variant), variant)
        elif variant.digest not in self.opened:
            contents = self.opened[variant.digest] = self.store.open(variant)
            check_same(parse(contents.files["metadata.json"], variant.name), variant)
        for needed, number in variant.kernel_depends:
            self._check(needed, number, repo_id, (*above, repo_id))
        return variant

    def _import(self, variant: LockedVariant) -> ModuleType:
        if variant.digest in _loaded:
            return _loaded[variant.digest]
        needed = {
            repo_id: self._import(self.lock.find(repo_id, number).fitting())
            for repo_id, number in variant.kernel_depends
        }
        check_names_free(variant)
        # From here on code may hold on to the descriptors: they stay open as long as the process.
        contents = self.opened.pop(variant.digest)
        source.prepare()
        source.import_for([contents])
        before = fingerprint.take()
        try:
            _validate(contents)
            module = source.import_build(contents, needed, functools.partial(self._asked_for, variant.id))
        except HubError:
            raise
        except Exception as error:
            raise refuse("HUB_PROBE_FAILED", f"{type(error).__name__}: {error}") from error
        _judge(before, fingerprint.take(), variant, self.store)
        _loaded[variant.digest] = module
        _namespaces.update(variant.ops_namespaces)
        return module

    def _asked_for(self, wanted_by: str, repo_id: str, version: int | None) -> ModuleType:
        """A kernel that another one asks for in its code: allowed, locked and verified like any, or refused."""
        self.policy.check_allowed(repo_id, wanted_by=wanted_by)
        if version is None:
            raise refuse("HUB_NOT_LOCKED", repo_id, detail="a version, not a branch or a commit")
        return _Loading(self.policy, self.lock).load(repo_id, version)


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
