"""The publisher's own signature of a build, which the hub offers beside it: `metadata.json.sigstore`.

It signs the metadata, whose digest covers every file of the build. Where it is present it is checked at lock time, with
the trust root that the library sigstore ships (nobody is asked): it must hold, and its signer must be one that the
library `kernels` trusts or that `hub.publishers` names. A build without one is judged by the other checks alone, unless
the build that was locked before had one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedKernel
from layerzero_hub.metadata import BuildMetadata

__all__ = ["BUNDLE", "WORKFLOW", "check_publisher_signature"]

BUNDLE: Final = "metadata.json.sigstore"
WORKFLOW: Final = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/\.github/workflows/[\w.-]+@refs/[\w./-]+\Z")


def check_publisher_signature(
    folder: Path,
    files: Mapping[str, object],
    metadata: BuildMetadata,
    where: str,
    publishers: Iterable[str],
    before: LockedKernel | None,
) -> bool:
    """Whether the build is signed by its publisher. Raises HUB_PUBLISHER_SIGNATURE for a signature that does not hold,
    and for a missing one where the kernel as it was locked before had one.
    """
    if BUNDLE not in files:
        if before is not None and any(BUNDLE in variant.files for variant in before.variants.values()):
            raise refuse("HUB_PUBLISHER_SIGNATURE", where, "there is none, and the build locked before had one")
        return False
    if metadata.digest_files is None:
        raise refuse("HUB_PUBLISHER_SIGNATURE", where, "the metadata it signs has no digest of the files")
    why = _verify((folder / "metadata.json").read_bytes(), (folder / BUNDLE).read_bytes(), publishers)
    if why:
        raise refuse("HUB_PUBLISHER_SIGNATURE", where, why)
    return True


def _verify(signed: bytes, bundle: bytes, publishers: Iterable[str]) -> str:
    """Empty when the signature holds, else why not."""
    from kernels.verify import DEFAULT_POLICIES, GitHubWorkflowPolicy
    from sigstore.models import Bundle
    from sigstore.verify import Verifier, policy

    signers: list[Any] = list(DEFAULT_POLICIES)
    for uri in publishers:
        repository = WORKFLOW.match(uri)
        assert repository is not None, "the policy was checked when it was read"
        signers.append(GitHubWorkflowPolicy(repo_id=repository[1], signer_uris=[uri]))
    try:
        with _quiet():
            Verifier.production(offline=True).verify_artifact(signed, Bundle.from_json(bundle), policy.AnyOf(signers))
    except Exception as error:  # the library raises many kinds; all mean: not verified
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Being offline is meant, and needs no warning."""
    log = logging.getLogger("sigstore")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
