"""`lz hub install`, `verify`, `audit` and `prune`: bring the store to what the lock says, look at it, clear it up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from layerzero.reasons import Reason, reason
from layerzero_hub import lockfile, signing
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock, LockedKernel, LockedVariant
from layerzero_hub.locking import Progress, builds_at, check_build, fetch_build
from layerzero_hub.metadata import check_locked, check_same
from layerzero_hub.policy import HubPolicy
from layerzero_hub.remote import Remote
from layerzero_hub.signing import Memory
from layerzero_hub.store import Store

ELSEWHERE = "for other machines"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one locked build; no reasons means all is well."""

    repo_id: str
    version: int
    variant: str
    digest: str
    state: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, kernel: LockedKernel, variant: LockedVariant, state: str, *reasons: Any, **more: Any) -> Self:
        return cls(kernel.repo_id, kernel.version, variant.name, variant.digest, state, *reasons, **more)

    @property
    def ok(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        names = ("repo_id", "version", "variant", "digest", "state", "ok", *(("notes",) if self.notes else ()))
        data = {name: getattr(self, name) for name in names}
        return {**data, "reasons": [item.to_json() for item in self.reasons]}


def install(
    lock: Lock,
    policy: HubPolicy,
    *,
    connect: Callable[[], Remote] | None,
    allow_rollback: bool = False,
    everywhere: bool = False,
    progress: Progress | None = None,
) -> tuple[Finding, ...]:
    """Put the builds for this machine (`everywhere`: for all machines) in the store; the lock is one of `read_lock`.

    `connect` None means frozen: what is not there already is an error. A build that is there and right costs no
    transfer. Raises HubError at the first refusal; the machine remembers the lock only when all are in place.
    """
    policy.check_endpoint(lock.endpoint)
    signing.check_signed(lock, policy)
    lock.check_current()
    memory, store = Memory(policy), Store(policy.store_path)
    if not allow_rollback:
        memory.check(lock)
    remote: Remote | None = None
    done = []
    for kernel, variant, here in _builds(lock):
        policy.check_allowed(kernel.repo_id)
        policy.check_digest(variant.digest)
        if not (here or everywhere):
            done.append(Finding.of(kernel, variant, ELSEWHERE))
            continue
        state = "present"
        if not store.is_right(variant):
            if connect is None:
                if store.installed(variant):
                    store.verify(variant)  # says what is wrong with it
                raise refuse("HUB_NOT_INSTALLED", str(kernel))
            remote = remote or connect()
            if not lock.signed_by:  # a signature speaks for the commit; without one, its place among the branches does
                remote.check_reachable(kernel.repo_id, kernel.version, kernel.commit)
            _fetch(remote, store, kernel, variant, progress)
            state = "installed"
        done.append(Finding.of(kernel, variant, state))
    memory.remember(lock)
    return tuple(done)


def verify(lock: Lock, policy: HubPolicy) -> tuple[Finding, ...]:
    """Check every locked build against policy and lock, byte for byte; asks no hub. Nothing is raised for a finding."""
    store, found = Store(policy.store_path), []
    for kernel, variant, here in _builds(lock):
        reasons: tuple[Reason, ...] = ()
        state = "verified"
        try:
            policy.check_allowed(kernel.repo_id)
            policy.check_endpoint(lock.endpoint)
            policy.check_digest(variant.digest)
            signing.check_signed(lock, policy)
            lock.check_current()
            Memory(policy).check(lock)
            store.check_quarantine(variant.digest)
            if here or store.installed(variant):
                store.verify(variant)
                check_locked(store.variant_path(variant), variant)
            else:
                state = ELSEWHERE
        except HubError as error:
            state, reasons = "refused", error.reasons
        found.append(Finding.of(kernel, variant, state, reasons))
    return tuple(found)


def audit(lock: Lock, remote: Remote) -> tuple[Finding, ...]:
    """`verify`, and what the hub says today: publisher trusted, branch at the locked commit, repository the same."""
    found = []
    for finding in verify(lock, remote.policy):
        kernel = lock.find(finding.repo_id, finding.version)
        reasons = list(finding.reasons)
        try:
            remote.check_publisher(kernel.repo_id)
            now = remote.branch(kernel.repo_id, kernel.version)
            if now != kernel.commit:
                reasons.append(reason("HUB_BRANCH_MOVED", f"v{kernel.version} ({now[:12]})", kernel.commit[:12]))
                remote.check_reachable(kernel.repo_id, kernel.version, kernel.commit)
            remote.check_identity(kernel.repo_id, kernel.commit)
        except HubError as error:
            reasons += error.reasons
        state = "attention" if reasons else "audited"
        found.append(replace(finding, state=state, reasons=tuple(reasons)))
    return tuple(found)


def prune(lock: Lock, policy: HubPolicy, *, dry_run: bool = False) -> tuple[tuple[str, int], ...]:
    """Remove the builds that no lock names any more; digest and bytes of each.

    A store may serve several locks: those seen here before count as well, as long as they are there and readable.
    """
    named = {variant.digest for _, variant in lock.variants()}
    for path in Memory(policy).other_locks():
        try:
            named |= {variant.digest for _, variant in lockfile.read(path).variants()}
        except HubError as error:
            why = f"it also uses this store, and cannot be read: {error}"
            raise refuse("HUB_LOCK_INVALID", path.name, why) from None
    store, found = Store(policy.store_path), []
    for entry in sorted(os.scandir(store.root), key=lambda entry: entry.name) if store.root.is_dir() else ():
        digest = entry.name.replace("-", ":", 1)
        if entry.name.startswith("sha256-") and digest not in named:
            held = (os.path.join(here, name) for here, _, names in os.walk(entry.path) for name in names)
            found.append((digest, sum(os.lstat(path).st_size for path in held)))
            if not dry_run:
                with writing("the store"):
                    store.discard(Path(entry.path))
    return tuple(found)


def _builds(lock: Lock) -> Iterator[tuple[LockedKernel, LockedVariant, bool]]:
    """Every locked build, and whether it is the one this machine would load."""
    for kernel in lock.kernels:
        try:
            fitting = kernel.fitting().name
        except HubError:
            fitting = ""  # a kernel for other machines only
        for variant in kernel.variants.values():
            yield kernel, variant, variant.name == fitting


def _fetch(
    remote: Remote, store: Store, kernel: LockedKernel, variant: LockedVariant, progress: Progress | None
) -> None:
    """All checks of the lock but the run, at the locked commit; then the bytes must have the locked hashes."""
    remote.check_publisher(kernel.repo_id)
    remote.check_identity(kernel.repo_id, kernel.commit)
    files = builds_at(remote, kernel.repo_id, kernel.commit).get(variant.name, {})
    for path in variant.files:
        if path not in files:
            raise refuse("HUB_STORE_MISSING_FILE", path, detail="at the hub")
    for path in files:
        if path not in variant.files:
            raise refuse("HUB_STORE_EXTRA_FILE", path, detail="at the hub")
    with writing("the store"), store.staging() as staging:
        folder = staging / variant.name
        found = fetch_build(remote, kernel, files, folder, progress)
        for path, locked in variant.files.items():
            if found[path] != locked:
                raise refuse("HUB_HASH_MISMATCH", path, locked.sha256)
        metadata = check_build(folder, found, f"{kernel.repo_id}/{variant.name}", remote.policy)
        check_same(metadata, variant)
        store.commit(staging, variant)
