"""`lz hub lock`: look at a kernel from all sides, then write down the hash of every byte.

The order is that of docs/hub.md: who, what, where from, the bytes, the binaries, and last a run in another process.
What passed is put in the store at once.
"""

from __future__ import annotations

import fnmatch
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from layerzero_hub import elf, fingerprint, lockfile
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock, LockedFile, LockedKernel, LockedVariant, digest_of
from layerzero_hub.memory import Memory
from layerzero_hub.metadata import BuildMetadata, check_digest, check_id_free, check_publisher_signature, parse
from layerzero_hub.names import check_paths, check_variant, fitting
from layerzero_hub.policy import HubPolicy
from layerzero_hub.probe import Need, Prober
from layerzero_hub.remote import Remote, RemoteFile
from layerzero_hub.store import Staging, Store

_BUILD: Final = "build/"
Progress = Callable[[str, int, int], None]
"""Called with file, bytes that came, bytes in all."""


@dataclass
class _Work:
    remote: Remote
    policy: HubPolicy
    store: Store
    prober: Prober | None
    allow_rollback: bool
    progress: Progress | None
    patterns: tuple[str, ...] = ()
    known: Mapping[tuple[str, int], LockedKernel] = field(default_factory=dict)
    done: dict[tuple[str, int], LockedKernel] = field(default_factory=dict)


def lock_kernels(
    wanted: Iterable[tuple[str, int]],
    *,
    remote: Remote,
    policy: HubPolicy,
    store: Store,
    known: Lock | None = None,
    probe: bool | Prober = True,
    allow_rollback: bool = False,
    variants: Iterable[str] = (),
    expires: str | None = None,
    progress: Progress | None = None,
) -> Lock:
    """The lock of these kernels and their dependencies, beside the `known` ones. On HubError nothing is locked.

    Locked is the build that fits this machine, those whose name fits a pattern of `variants`, and those that the known
    lock held of the kernel. `expires` is a time, "" for never, None to keep that of the known lock.
    """
    kept = {(kernel.repo_id, kernel.version): kernel for kernel in (known.kernels if known else ())}
    with nullcontext(probe) if isinstance(probe, Prober) else Prober() as prober:
        work = _Work(remote, policy, store, prober if probe else None, allow_rollback, progress, tuple(variants), kept)
        for repo_id, version in wanted:
            _lock(work, repo_id, version, "", ())
    kept = {**kept, **work.done}
    _check_apart(kept.values())
    return _renewed(known, remote.web.endpoint, tuple(kept[key] for key in sorted(kept)), policy, expires)


def _renewed(
    known: Lock | None, endpoint: str, kernels: tuple[LockedKernel, ...], policy: HubPolicy, expires: str | None = None
) -> Lock:
    """A lock of these kernels that is newer than all seen before; the known one when nothing changed."""
    if expires is None:
        if known is not None:
            try:
                known.check_current()
            except HubError as error:
                raise refuse(error.code, known.expires, detail="say --expires DAYS, or --expires never") from None
        expires = known.expires if known else ""
    if known and known.serial and (known.endpoint, known.kernels, known.expires) == (endpoint, kernels, expires):
        return known
    lock_id = (known.lock_id if known else "") or uuid.uuid4().hex
    seen = Memory(policy.store_path).newest(policy.lock_path, lock_id)
    serial = max(int(time.time()), seen + 1, known.serial + 1 if known else 1)
    return Lock(endpoint, kernels, serial, expires, lock_id)


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
    return _renewed(lock, lock.endpoint, kept, policy)


def save(lock: Lock, policy: HubPolicy) -> None:
    """Write the lock and `kernels.lock` beside it; only then this machine remembers it as the newest."""
    from layerzero_hub.compat import write_kernels_lock
    from layerzero_hub.signing import signature_path

    path = policy.lock_path
    with writing(path.name):
        changed = not path.exists() or path.read_bytes() != lockfile.written(lock)
        if changed:
            lockfile.write(lock, path)
            # It was made for other bytes: without it the next step says that a signature is missing, not bad.
            with suppress(FileNotFoundError):
                signature_path(path).unlink()
        write_kernels_lock(lock, path.with_name("kernels.lock"))
    Memory(policy.store_path).remember(lock, path, ours=True)


def refuse_cheats(lock: Lock, policy: HubPolicy) -> tuple[str, ...]:
    """Take kernels out of a lock that pass checks by cheating, and raise for the first; what could not be looked at.

    Only kernels that are mapped to an op can be called; layerzero-hostile calls them, in processes of its own.
    """
    from layerzero_hub.specs import survey

    mapped = {name: kernel for name, kernel in survey(policy, lock)[0].items() if not kernel.refused}
    gate = next(iter(entry_points(group="layerzero.parts", name="hostile.refusals")), None)
    if not mapped:
        return ()
    if gate is None:
        return ("not looked at for cheats: pip install layerzero-hostile",)
    for name, why in gate.load()(mapped, None).items():
        guilty = mapped[name]
        save(without(lock, [(guilty.repo_id, guilty.version)], policy), policy)
        raise refuse("HUB_KERNEL_CHEATS", f"{guilty.repo_id}@{guilty.version} ({name})", why)
    return ()


def _lock(work: _Work, repo_id: str, version: int, wanted_by: str, above: tuple[str, ...]) -> LockedKernel:
    work.policy.check_allowed(repo_id, wanted_by=wanted_by)
    if repo_id in above:
        raise refuse("HUB_METADATA_INVALID", repo_id, "it depends on itself")
    if (repo_id, version) in work.done:
        return work.done[(repo_id, version)]
    work.remote.check_publisher(repo_id)
    commit = work.remote.branch(repo_id, version)
    work.remote.check_identity(repo_id, commit)
    builds = _builds(work.remote.tree(repo_id, commit))
    kernel = LockedKernel(repo_id, version, commit, {})
    here, names = _chosen(work, kernel, builds)
    found = {name: _lock_build(work, kernel, name, builds[name], above, probe=name == here) for name in names}
    kernel = replace(kernel, variants=found)
    work.done[(repo_id, version)] = kernel
    return kernel


def _lock_build(
    work: _Work,
    kernel: LockedKernel,
    name: str,
    files_there: Mapping[str, RemoteFile],
    above: tuple[str, ...],
    *,
    probe: bool,
) -> LockedVariant:
    """One build, from its files at the hub to the store. What fits another machine cannot be run here, only read."""
    repo_id = kernel.repo_id
    with writing("the store"), work.store.staging() as staging:
        files = fetch_build(work.remote, repo_id, kernel.commit, name, files_there, staging, work.progress)
        folder = staging.folder / name
        metadata = check_build(folder, files, f"{repo_id}/{name}", work.policy)
        check_id_free(metadata.id)
        before = work.known.get((repo_id, kernel.version))
        check_publisher_signature(folder, files, metadata, f"{repo_id}/{name}", work.policy.publishers, before)
        needs: dict[str, Need] = {}
        for needed, number in metadata.depends:
            dependency = _lock(work, needed, number, repo_id, (*above, repo_id))
            if probe:
                needs[needed] = _need(work, dependency.variants[fitting(needed, dependency.variants)])
        variant = LockedVariant(name, digest_of(files), metadata.id, (), metadata.depends, files)
        work.policy.check_digest(variant.digest)
        if not work.allow_rollback:
            Memory(work.policy.store_path).check_build(kernel, variant)
        spaces = _probe(work.prober, folder, variant, needs) if work.prober and probe else (metadata.id,)
        variant = replace(variant, ops_namespaces=spaces)
        work.store.commit(staging, variant)
    return variant


def _need(work: _Work, variant: LockedVariant) -> Need:
    """A locked build for the probe, with the whole chain of what it depends on."""
    below = {
        repo_id: _need(work, kernel.variants[fitting(repo_id, kernel.variants)])
        for repo_id, number in variant.kernel_depends
        for kernel in (work.done[(repo_id, number)],)
    }
    return Need(work.store.variant_path(variant), variant, below)


def _chosen(work: _Work, kernel: LockedKernel, builds: Mapping[str, object]) -> tuple[str, list[str]]:
    """The build for this machine ("" when there is none), and all that are to be locked."""
    before = work.known.get((kernel.repo_id, kernel.version))
    kept = set(before.variants) if before else set()
    asked = {name for name in builds if name in kept or any(fnmatch.fnmatchcase(name, one) for one in work.patterns)}
    try:
        here = fitting(kernel.repo_id, builds)
    except HubError:
        if not asked:
            raise
        return "", sorted(asked)
    return here, sorted(asked | {here})


def fetch_build(
    remote: Remote,
    repo_id: str,
    commit: str,
    name: str,
    files: Mapping[str, RemoteFile],
    staging: Staging,
    progress: Progress | None = None,
) -> dict[str, LockedFile]:
    """Download the files of one build into a staging folder, each checked against the tree; path → hash and size."""
    total = sum(file.size for file in files.values())
    if total > remote.policy.max_bytes:
        raise refuse("HUB_TOO_LARGE", total, remote.policy.max_bytes, detail=f"{repo_id} {name}")
    found: dict[str, LockedFile] = {}
    came = 0
    for path, file in sorted(files.items()):

        def count(size: int, path: str = path) -> None:
            nonlocal came
            came += size
            if progress is not None:
                progress(f"{repo_id} {path}", came, total)

        with staging.create(f"{name}/{path}") as sink:
            found[path] = remote.fetch(repo_id, commit, file, sink, count)
    return found


def check_build(folder: Path, files: Mapping[str, LockedFile], where: str, policy: HubPolicy) -> BuildMetadata:
    """Metadata, the build's own digest, and every shared object. No code of the kernel runs."""
    if "metadata.json" not in files:
        raise refuse("HUB_METADATA_INVALID", where, "there is none")
    metadata = parse((folder / "metadata.json").read_bytes(), where)
    check_digest(metadata, folder, files)
    for path in sorted(files):
        place = folder / path
        if elf.is_elf(place) or ".so" in place.name:
            elf.check_shared_object(place, path, needed=policy.needed_libs)
    return metadata


def _builds(tree: Iterable[RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """The tree as builds: variant → path inside it → file. Every path of the repository is judged, not only these."""
    listed = tuple(tree)
    check_paths(file.path for file in listed)
    builds: dict[str, dict[str, RemoteFile]] = {}
    for file in listed:
        if not file.path.startswith(_BUILD) or file.path.count("/") < 2:
            continue
        name, inside = file.path.removeprefix(_BUILD).split("/", 1)
        builds.setdefault(check_variant(name), {})[inside] = file
    return builds


def _probe(prober: Prober, folder: Path, variant: LockedVariant, needs: Mapping[str, Need]) -> tuple[str, ...]:
    seen = prober.run(folder, variant, needs=needs)
    if seen.changed:
        raise refuse("HUB_DISPATCHER_CHANGED", seen.changed[0])
    for space in seen.namespaces:
        if space.lstrip("_") != variant.id.lstrip("_"):  # the builder's suffix or dash aside, its own is its id
            raise refuse("HUB_NAMESPACE_FOREIGN", space, variant.id)
        if space in fingerprint.namespaces():
            raise refuse("HUB_NAMESPACE_DUPLICATE", space, "this process")
    return seen.namespaces


def _check_apart(kernels: Iterable[LockedKernel]) -> None:
    """No two locked builds may share an id or an ops namespace: they would meet in one process."""
    spaces: dict[str, str] = {}
    ids: dict[str, str] = {}
    for kernel in kernels:
        who = f"{kernel.repo_id}@{kernel.version}"
        for variant in kernel.variants.values():
            if ids.setdefault(variant.id, who) != who:
                raise refuse("HUB_ID_TAKEN", variant.id, ids[variant.id])
            for space in variant.ops_namespaces:
                if spaces.setdefault(space, who) != who:
                    raise refuse("HUB_NAMESPACE_DUPLICATE", space, spaces[space])
