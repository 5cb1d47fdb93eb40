"""`lz hub lock`: look at a kernel from all sides, then write down the hash of every byte.

The order is that of docs/hub.md: who, what, where from, the bytes, the binaries, and last a run in another process.
What passed is put in the store at once.
"""

from __future__ import annotations

import fnmatch
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path

from layerzero.files import write_whole
from layerzero_hub import elf, fingerprint, lockfile
from layerzero_hub.errors import HubError, refuse, writing
from layerzero_hub.lockfile import Lock, LockedFile, LockedKernel, LockedVariant, digest_of
from layerzero_hub.metadata import BuildMetadata, check_digest, check_id_free, check_publisher_signature, parse
from layerzero_hub.names import check_paths, check_variant, fitting
from layerzero_hub.policy import HubPolicy
from layerzero_hub.probe import Placed, Prober
from layerzero_hub.remote import Remote, RemoteFile
from layerzero_hub.signing import Memory, signature_path
from layerzero_hub.store import Store, new_file

Progress = Callable[[int, int, str], None]
"""Called with bytes that came, bytes in all, file."""


@dataclass
class _Work:
    remote: Remote
    prober: Prober | None
    allow_rollback: bool
    progress: Progress | None
    patterns: tuple[str, ...]
    known: Mapping[tuple[str, int], LockedKernel]
    done: dict[tuple[str, int], LockedKernel] = field(default_factory=dict)

    @property
    def policy(self) -> HubPolicy:
        return self.remote.policy


def lock_kernels(
    wanted: Iterable[tuple[str, int]],
    remote: Remote,
    *,
    prober: Prober | None,
    known: Lock | None = None,
    allow_rollback: bool = False,
    variants: Iterable[str] = (),
    expires: str | None = None,
    progress: Progress | None = None,
) -> Lock:
    """The lock of these kernels and their dependencies, beside the `known` ones. On HubError nothing is locked.

    Locked is the build that fits this machine, those whose name fits a pattern of `variants`, and those that the known
    lock held of the kernel. Without `prober` none is imported. `expires` is a time, "" for never, None to keep that of
    the known lock.
    """
    kept = {kernel.key: kernel for kernel in (known.kernels if known else ())}
    work = _Work(remote, prober, allow_rollback, progress, tuple(variants), kept)
    for repo_id, version in wanted:
        _lock(work, repo_id, version, "", ())
    kept = {**kept, **work.done}
    kernels = tuple(kept[key] for key in sorted(kept))
    _check_apart(kernels)
    return _renewed(known, remote.web.endpoint, kernels, remote.policy, expires)


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
    seen = Memory(policy).newest(lock_id)
    serial = max(int(time.time()), seen + 1, known.serial + 1 if known else 1)
    return Lock(endpoint, kernels, serial, expires, lock_id)


def without(lock: Lock, wanted: Sequence[tuple[str, int | None]], policy: HubPolicy) -> Lock:
    """The lock without these kernels (version None: all versions); refused while another one needs them."""
    gone: set[tuple[str, int]] = set()
    for repo_id, version in wanted:
        found = {one.key for one in lock.kernels if one.repo_id == repo_id and version in (None, one.version)}
        if not found:
            raise refuse("HUB_NOT_LOCKED", repo_id if version is None else f"{repo_id}@{version}")
        gone |= found
    for kernel, variant in lock.variants():
        for repo_id, number in variant.kernel_depends:
            if (repo_id, number) in gone and kernel.key not in gone:
                raise refuse("HUB_STILL_NEEDED", f"{repo_id}@{number}", str(kernel))
    kept = tuple(kernel for kernel in lock.kernels if kernel.key not in gone)
    return _renewed(lock, lock.endpoint, kept, policy)


def save(lock: Lock, policy: HubPolicy) -> None:
    """Write the lock and `kernels.lock` beside it; only then this machine remembers it as the newest."""
    path = policy.lock_path
    with writing(path.name):
        if not path.exists() or path.read_bytes() != lockfile.written(lock):
            lockfile.write(lock, path)
            # It was made for other bytes: without it the next step says that a signature is missing, not bad.
            with suppress(FileNotFoundError):
                signature_path(path).unlink()
        write_kernels_lock(lock, path.with_name("kernels.lock"))
    Memory(policy).remember(lock, ours=True)


def write_kernels_lock(lock: Lock, path: Path) -> None:
    """Repository, version and commit in the form `kernels` reads. Our own lock stays the authority."""
    from kernels._rust import KernelDependency, KernelLock, KernelLocks, KernelVersion

    entries = {
        KernelDependency(kernel.repo_id, KernelVersion.Version(kernel.version)): KernelLock(kernel.commit)
        for kernel in lock.kernels
    }
    write_whole(path, KernelLocks(entries).to_json() + "\n")


def refuse_cheats(lock: Lock, policy: HubPolicy) -> tuple[str, ...]:
    """Take kernels out of a lock that pass checks by cheating, and raise for the first; what could not be looked at.

    Only kernels that are mapped to an op can be called; layerzero-hostile calls them, in processes of its own.
    """
    from layerzero_hub.bound import survey

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
    builds = builds_at(work.remote, repo_id, commit)
    kernel = LockedKernel(repo_id, version, commit, {})
    here, names = _chosen(work, kernel, builds)
    found = {name: _lock_build(work, kernel, name, builds[name], above, probe=name == here) for name in names}
    kernel = replace(kernel, variants=found)
    work.done[kernel.key] = kernel
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
    repo_id, store = kernel.repo_id, Store(work.policy.store_path)
    with writing("the store"), store.staging() as staging:
        folder = staging / name
        files = fetch_build(work.remote, kernel, files_there, folder, work.progress)
        metadata = check_build(folder, files, f"{repo_id}/{name}", work.policy)
        check_id_free(metadata.id)
        before = work.known.get(kernel.key)
        check_publisher_signature(folder, files, metadata, f"{repo_id}/{name}", work.policy.publishers, before)
        needs: dict[str, Placed] = {}
        for needed, number in metadata.depends:
            dependency = _lock(work, needed, number, repo_id, (*above, repo_id))
            if probe:
                needs |= _needs(work, store, dependency)
        variant = LockedVariant(name, digest_of(files), metadata.id, (), metadata.depends, files)
        work.policy.check_digest(variant.digest)
        if not work.allow_rollback:
            Memory(work.policy).check_build(kernel, variant)
        spaces = _probe(work.prober, folder, variant, needs) if work.prober and probe else (metadata.id,)
        variant = replace(variant, ops_namespaces=spaces)
        store.commit(staging, variant)
    return variant


def _needs(work: _Work, store: Store, kernel: LockedKernel) -> dict[str, Placed]:
    """The build of a locked kernel that fits, for the probe, with the whole chain of what it depends on."""
    variant = kernel.fitting()
    found = {str(kernel): (store.variant_path(variant), variant)}
    for needed in variant.kernel_depends:
        found |= _needs(work, store, work.done[needed])
    return found


def _chosen(work: _Work, kernel: LockedKernel, builds: Mapping[str, object]) -> tuple[str, list[str]]:
    """The build for this machine ("" when there is none), and all that are to be locked."""
    before = work.known.get(kernel.key)
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
    kernel: LockedKernel,
    files: Mapping[str, RemoteFile],
    folder: Path,
    progress: Progress | None,
) -> dict[str, LockedFile]:
    """Download the files of one build into its new folder, each checked against the tree; path → hash and size."""
    total = sum(file.size for file in files.values())
    if total > remote.policy.max_bytes:
        raise refuse("HUB_TOO_LARGE", total, remote.policy.max_bytes, detail=f"{kernel.repo_id} {folder.name}")
    found: dict[str, LockedFile] = {}
    came = 0
    for path, file in sorted(files.items()):

        def count(size: int, path: str = path) -> None:
            nonlocal came
            came += size
            if progress is not None:
                progress(came, total, f"{kernel.repo_id} {path}")

        with new_file(folder / path) as sink:
            found[path] = remote.fetch(kernel.repo_id, kernel.commit, file, sink, count)
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


def builds_at(remote: Remote, repo_id: str, commit: str) -> dict[str, dict[str, RemoteFile]]:
    """The tree as builds: variant → path inside it → file. Every path of the repository is judged, not only these."""
    listed = remote.tree(repo_id, commit)
    check_paths(file.path for file in listed)
    builds: dict[str, dict[str, RemoteFile]] = {}
    for file in listed:
        top, _, below = file.path.partition("/")
        name, _, inside = below.partition("/")
        if top == "build" and inside:
            builds.setdefault(check_variant(name), {})[inside] = file
    return builds


def _probe(prober: Prober, folder: Path, variant: LockedVariant, needs: Mapping[str, Placed]) -> tuple[str, ...]:
    seen = prober.run(folder, variant, needs=needs)
    for space in seen:
        if space.lstrip("_") != variant.id.lstrip("_"):  # the builder's suffix or dash aside, its own is its id
            raise refuse("HUB_NAMESPACE_FOREIGN", space, variant.id)
        if space in fingerprint.namespaces():
            raise refuse("HUB_NAMESPACE_DUPLICATE", space, "this process")
    return seen


def _check_apart(kernels: Iterable[LockedKernel]) -> None:
    """No two locked builds may share an id or an ops namespace: they would meet in one process."""
    spaces: dict[str, str] = {}
    ids: dict[str, str] = {}
    for kernel in kernels:
        who = str(kernel)
        for variant in kernel.variants.values():
            if ids.setdefault(variant.id, who) != who:
                raise refuse("HUB_ID_TAKEN", variant.id, ids[variant.id])
            for space in variant.ops_namespaces:
                if spaces.setdefault(space, who) != who:
                    raise refuse("HUB_NAMESPACE_DUPLICATE", space, spaces[space])
