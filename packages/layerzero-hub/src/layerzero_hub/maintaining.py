"""Looking after a lock and its store: what changed, what is no longer needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layerzero_hub import lockfile
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock
from layerzero_hub.locking import renewed
from layerzero_hub.memory import Memory
from layerzero_hub.policy import HubPolicy
from layerzero_hub.store import Store

__all__ = ["Change", "changes", "prune", "without"]


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


def without(lock: Lock, wanted: Sequence[tuple[str, int | None]], policy: HubPolicy) -> Lock:
    """The lock without these kernels (version None: all versions); refused while another one needs them."""
    gone: set[tuple[str, int]] = set()
    for repo_id, version in wanted:
        named = {(kernel.repo_id, kernel.version) for kernel in lock.kernels}
        found = {one for one in named if one[0] == repo_id and version in (None, one[1])}
        if not found:
            raise refuse("HUB_NOT_LOCKED", repo_id if version is None else f"{repo_id}@{version}")
        gone |= found
    kept = tuple(kernel for kernel in lock.kernels if (kernel.repo_id, kernel.version) not in gone)
    for kernel in kept:
        for variant in kernel.variants.values():
            for needed in variant.kernel_depends:
                if needed in gone:
                    raise refuse("HUB_STILL_NEEDED", f"{needed[0]}@{needed[1]}", f"{kernel.repo_id}@{kernel.version}")
    return renewed(lock, lock.endpoint, kept, policy)


def prune(lock: Lock, *, policy: HubPolicy, store: Store, dry_run: bool = False) -> tuple[tuple[str, int], ...]:
    """Remove the builds that no lock names any more; digest and bytes of each.

    A store may serve several locks: those seen here before count as well, as long as they are there and readable.
    """
    named = {variant.digest for _, variant in lock.variants()}
    for path in Memory(store.root).lock_paths():
        if path == Path(os.path.realpath(policy.lock_path)) or not path.exists():
            continue
        try:
            named |= {variant.digest for _, variant in lockfile.read(path).variants()}
        except HubError as error:
            raise refuse(
                "HUB_LOCK_INVALID", path.name, f"it also uses this store, and cannot be read: {error}"
            ) from None
    found = []
    for entry in sorted(os.scandir(store.root), key=lambda entry: entry.name) if store.root.is_dir() else ():
        digest = entry.name.replace("-", ":", 1)
        if entry.name.startswith("sha256-") and digest not in named:
            found.append((digest, _size(entry.path)))
            if not dry_run:
                with writing("the store"):
                    # Renamed first: half a build never lies under the name of a whole one.
                    aside = store.root / f"damaged-{entry.name}-{os.getpid()}"
                    os.rename(entry.path, aside)
                    shutil.rmtree(aside, ignore_errors=True)
    return tuple(found)


def _size(folder: str) -> int:
    return sum(os.lstat(os.path.join(here, name)).st_size for here, _, names in os.walk(folder) for name in names)
