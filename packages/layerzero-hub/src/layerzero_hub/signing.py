"""Signatures over the lock, with OpenSSF model-signing and a local EC key: offline, no transparency log.

The lock holds the hash of every byte that may run, so a signature over it covers the store as well. Where the policy
names `signing_keys`, a lock without a signature by one of them is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero_hub.errors import refuse
from layerzero_hub.policy import HubPolicy

__all__ = ["check_lock", "sign_lock", "signature_path"]


def signature_path(lock: Path) -> Path:
    """Where the signature of a lock lies: beside it."""
    return lock.with_name(lock.name + ".sig")


def sign_lock(lock: Path, private_key: Path) -> Path:
    """Sign a lock with a private EC key (PEM); returns the signature's path."""
    model_signing = _vendor()
    target = signature_path(lock)
    if not lock.is_file():
        raise refuse("HUB_LOCK_MISSING", lock.name)
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=private_key)
    temporary = target.with_name(target.name + ".new")
    try:
        config.set_hashing_config(_hashing(model_signing, lock)).sign(lock, temporary)
        temporary.replace(target)
    except (ValueError, OSError) as error:
        raise refuse("HUB_SIGNATURE_BAD", lock.name, f"cannot sign: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def check_lock(policy: HubPolicy) -> None:
    """Raise unless the lock is signed by a key of the policy, where the policy names keys."""
    if not policy.signing_keys:
        return
    lock = policy.lock_path
    signature = signature_path(lock)
    if not signature.is_file():
        raise refuse("HUB_SIGNATURE_MISSING", lock.name)
    model_signing = _vendor()
    foreign = 0
    for key in policy.signing_keys:
        verdict = _verify(model_signing, lock, signature, Path(key))
        if not verdict:
            return
        foreign += "Key mismatch" in verdict
        last = verdict
    if foreign == len(policy.signing_keys):
        raise refuse("HUB_SIGNATURE_FOREIGN", lock.name, detail=last)
    raise refuse("HUB_SIGNATURE_BAD", lock.name, last)


def _verify(vendor: Any, lock: Path, signature: Path, key: Path) -> str:
    """Empty when the signature holds, else why not."""
    try:
        config = vendor.verifying.Config().use_elliptic_key_verifier(public_key=key)
        config.set_hashing_config(_hashing(vendor, lock)).verify(lock, signature)
    except Exception as error:  # the library raises many kinds; all mean: not verified
        return f"{type(error).__name__}: {error}" or "not verified"
    return ""


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
