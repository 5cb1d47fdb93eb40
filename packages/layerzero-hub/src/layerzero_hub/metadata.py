"""`metadata.json` of a build: what the kernel says of itself, whether its digest covers every file, who signed it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.machinery
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from layerzero_hub.contents import read_file
from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedKernel, LockedVariant
from layerzero_hub.names import check_module_id, check_repo_id, strict_json

BUNDLE: Final = "metadata.json.sigstore"
WORKFLOW: Final = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/\.github/workflows/[\w.-]+@refs/[\w./-]+\Z")

_MAX_BYTES: Final = 2**20
# Written by the publisher's tools beside the build, after the digest was taken.
_OUTSIDE_DIGEST: Final = frozenset({"metadata.json", BUNDLE, "metadata.json.sig"})


@dataclass(frozen=True, slots=True)
class BuildMetadata:
    """The fields that matter here."""

    id: str
    depends: tuple[tuple[str, int], ...]
    digest_algorithm: str = ""
    digest_files: Mapping[str, str] | None = None


def parse(raw: bytes, where: str) -> BuildMetadata:
    """The metadata in these bytes; `kernels` must be able to read them too. Only HubError is raised."""
    data = strict_json(raw, "HUB_METADATA_INVALID", where, _MAX_BYTES)
    if not isinstance(data, dict):
        raise refuse("HUB_METADATA_INVALID", where, "no mapping")
    from kernels._rust import Metadata

    try:
        found = Metadata.from_bytes(raw)
    except ValueError as error:
        raise refuse("HUB_METADATA_INVALID", where, str(error)) from None
    for part in (data.get("digest") or {}, *(data.get("kernel-depends") or ())):
        if not isinstance(part, dict):  # `kernels` takes lists in their place
            raise refuse("HUB_METADATA_INVALID", where, "digest and dependencies must be mappings")
    if not found.id.isascii() or not found.id.isidentifier():
        raise refuse("HUB_METADATA_INVALID", where, "id must be a Python name")
    if found.version is None:
        raise refuse("HUB_METADATA_INVALID", where, "name and version are needed")
    depends = []
    for one in found.kernel_depends:
        version = getattr(one.version, "version", None)
        if version is None:
            raise refuse("HUB_METADATA_INVALID", where, "a dependency names repo-id and version, not a branch")
        depends.append((check_repo_id(one.repo_id), version))
    if found.digest is None:
        return BuildMetadata(found.id, tuple(depends))
    return BuildMetadata(found.id, tuple(depends), data["digest"]["algorithm"], found.digest.files)


def check_id_free(identity: str) -> None:
    """Raise when loading under this id would stand in for a module that exists or could: it goes into sys.modules."""
    check_module_id(identity)
    if identity in sys.stdlib_module_names or identity in sys.builtin_module_names:
        raise refuse("HUB_ID_TAKEN", identity, "the standard library")
    if identity in sys.modules:
        raise refuse("HUB_ID_TAKEN", identity, "a module of this process")
    # PathFinder looks only: importlib.util.find_spec would run hooks of others.
    if importlib.machinery.PathFinder.find_spec(identity) is not None:
        raise refuse("HUB_ID_TAKEN", identity, "an installed module")


def check_locked(folder: Path, variant: LockedVariant) -> None:
    """Raise HUB_ID_MISMATCH unless the lock and the metadata of an installed build name the same module and needs.

    `kernels` imports under the metadata's id and not the lock's: checks made on the other would check nothing.
    """
    check_same(parse(read_file(folder, "metadata.json", variant), variant.name), variant)


def check_same(metadata: BuildMetadata, variant: LockedVariant) -> None:
    """Raise HUB_ID_MISMATCH unless metadata and lock agree."""
    if metadata.id != variant.id:
        raise refuse("HUB_ID_MISMATCH", variant.id, metadata.id)
    if set(metadata.depends) != set(variant.kernel_depends):
        said = ", ".join(f"{repo}@{number}" for repo, number in metadata.depends) or "none"
        raise refuse("HUB_ID_MISMATCH", "other dependencies", said)


def check_digest(metadata: BuildMetadata, folder: Path, files: Mapping[str, Any]) -> None:
    """Raise unless the build's own digest, where it has one, covers each file with the right hash."""
    if metadata.digest_files is None:
        return
    for path in files:
        if path in _OUTSIDE_DIGEST:
            continue
        said = metadata.digest_files.get(path)
        if said is None:
            raise refuse("HUB_DIGEST_INCOMPLETE", path)
        with (folder / path).open("rb") as file:
            found = hashlib.file_digest(file, metadata.digest_algorithm).digest()
        if base64.b64encode(found).decode("ascii") != said:
            raise refuse("HUB_HASH_MISMATCH", path, "the digest of metadata.json")
    for path in metadata.digest_files:
        if path not in files:
            raise refuse("HUB_STORE_MISSING_FILE", path)


def check_publisher_signature(
    folder: Path,
    files: Mapping[str, object],
    metadata: BuildMetadata,
    where: str,
    publishers: Iterable[str],
    before: LockedKernel | None,
) -> None:
    """Raise HUB_PUBLISHER_SIGNATURE for a publisher's signature that does not hold.

    The hub offers it beside the build: it signs the metadata, whose digest covers every file. Where it is present it is
    checked at lock time, with the trust root that the library sigstore ships (nobody is asked): it must hold, and its
    signer must be one that the library `kernels` trusts or that `hub.publishers` names. A build without one is judged
    by the other checks alone, unless the kernel as it was locked before had one.
    """
    if BUNDLE not in files:
        if before is not None and any(BUNDLE in variant.files for variant in before.variants.values()):
            raise refuse("HUB_PUBLISHER_SIGNATURE", where, "there is none, and the build locked before had one")
        return
    if metadata.digest_files is None:
        raise refuse("HUB_PUBLISHER_SIGNATURE", where, "the metadata it signs has no digest of the files")
    from kernels.verify import DEFAULT_POLICIES, GitHubWorkflowPolicy
    from sigstore.models import Bundle
    from sigstore.verify import Verifier, policy

    signers: list[Any] = list(DEFAULT_POLICIES)
    for uri in publishers:
        repository = WORKFLOW.match(uri)
        assert repository is not None, "the policy was checked when it was read"
        signers.append(GitHubWorkflowPolicy(repo_id=repository[1], signer_uris=[uri]))
    signed, bundle = (folder / "metadata.json").read_bytes(), (folder / BUNDLE).read_bytes()
    try:
        with contextlib.ExitStack() as after:
            log = logging.getLogger("sigstore")
            after.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)  # being offline is meant, and needs no warning
            Verifier.production(offline=True).verify_artifact(signed, Bundle.from_json(bundle), policy.AnyOf(signers))
    except Exception as error:  # the library raises many kinds; all mean: not verified
        raise refuse("HUB_PUBLISHER_SIGNATURE", where, f"{type(error).__name__}: {error}") from None
