"""Optional signatures of dispatch tables: a table that a build made is the table that production obeys.

Two kinds, told apart by their first word: `hmac-sha256` with a shared secret (any file of 16 bytes or more), and
`ed25519` with a key pair in PEM form, where the `cryptography` package is installed. The signature covers the content
hash, and that covers everything else.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

from layerzero.errors import DispatchTableError

__all__ = ["sign", "verify"]

_LEAST = 16
_SAID = b"layerzero dispatch table "


def sign(content_hash: str, key: str | Path) -> str:
    """The signature of a table with the key in a file."""
    raw = _key(key)
    if _is_pem(raw):
        private: Any = _crypto().load_pem_private_key(raw, password=None)
        return f"ed25519:{private.sign(_SAID + content_hash.encode()).hex()}"
    return f"hmac-sha256:{hmac.new(raw, _SAID + content_hash.encode(), hashlib.sha256).hexdigest()}"


def verify(content_hash: str, signature: str | None, key: str | Path) -> None:
    """Refuse a table that bears no signature by this key. Raises DispatchTableError."""
    raw = _key(key)
    kind, _, found = (signature or "").partition(":")
    if not found:
        raise _refused("it is not signed")
    if _is_pem(raw):
        if kind != "ed25519":
            raise _refused(f"signed with {kind}, the key is for ed25519")
        try:
            public: Any = _crypto().load_pem_public_key(raw)
        except ValueError:
            public = _crypto().load_pem_private_key(raw, password=None).public_key()
        try:
            public.verify(bytes.fromhex(found), _SAID + content_hash.encode())
        except Exception:  # InvalidSignature, or hex that is none
            raise _refused("the signature is not by this key") from None
        return
    wanted = hmac.new(raw, _SAID + content_hash.encode(), hashlib.sha256).hexdigest()
    if kind != "hmac-sha256" or not hmac.compare_digest(found.encode(), wanted.encode()):
        raise _refused("the signature is not by this key")


def _key(path: str | Path) -> bytes:
    try:
        raw = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DispatchTableError(
            f"the key {path} cannot be read: {error.strerror}", code="CONFIG_FILE_MISSING", value=str(path)
        ) from None
    if len(raw) < _LEAST:
        raise DispatchTableError(
            f"the key {path} is too short", code="CONFIG_INVALID", value=f"{len(raw)} bytes", limit=f"{_LEAST} or more"
        )
    return raw


def _is_pem(raw: bytes) -> bool:
    return raw.lstrip().startswith(b"-----BEGIN")


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise DispatchTableError(
            "an ed25519 key needs the cryptography package", code="BACKEND_NOT_INSTALLED", value="cryptography",
            hint="pip install cryptography, or use a shared secret",
        ) from None  # fmt: skip
    return serialization


def _refused(why: str) -> DispatchTableError:
    return DispatchTableError(why, code="PLAN_SIGNATURE_INVALID", value=why)
