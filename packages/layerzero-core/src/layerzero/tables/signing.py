"""Optional signatures of dispatch tables: a table that a build made is the table that production obeys.

Two kinds, told apart by their first word: `hmac-sha256` with a shared secret (any file of 16 bytes or more), and
`ed25519` with a key pair in PEM form, where the `cryptography` package is installed. The signature covers the content
hash, and that covers everything else.

A public key is never a shared secret: everybody who has it could sign. In PEM form it verifies ed25519 signatures; in
any other form (OpenSSH, DER, JWK, minisign, their base64) it is refused, and so are 32 bytes that everybody can read,
which may be one without any form.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

from layerzero.errors import DispatchTableError

_LEAST = 16
_RAW = (32, 57)  # bytes of an ed25519 and of an ed448 public key without any form
_BEGIN = b"-----BEGIN"
_PUBLIC_WORDS = re.compile(
    rb"\b(ssh-(ed25519|ed448|rsa|dss)|ecdsa-sha2-|sk-(ssh|ecdsa)-)|public key|\"kty\"|^RW[A-Za-z0-9+/]{54}$",
    re.MULTILINE | re.IGNORECASE,
)


def sign(content_hash: str, key: str | Path, what: str = "dispatch table") -> str:
    """The signature of a table with the key in a file; `what` else is signed is no table's signature."""
    raw, said = _key(key), f"layerzero {what} {content_hash}".encode()
    if _is_pem(raw):
        return f"ed25519:{_private(raw, key).sign(said).hex()}"
    return f"hmac-sha256:{hmac.new(raw, said, hashlib.sha256).hexdigest()}"


def verify(content_hash: str, signature: str | None, key: str | Path, what: str = "dispatch table") -> None:
    """Refuse a table that bears no signature by this key. Raises DispatchTableError."""
    raw, said = _key(key), f"layerzero {what} {content_hash}".encode()
    kind, _, found = (signature or "").partition(":")
    if not found:
        raise _refused("it is not signed")
    if _is_pem(raw):
        if kind != "ed25519":
            raise _refused(f"signed with {kind}, the key is for ed25519")
        public = _public(raw, key)
        try:
            public.verify(bytes.fromhex(found), said)
        except Exception:  # InvalidSignature, or hex that is none
            raise _refused("the signature is not by this key") from None
        return
    wanted = hmac.new(raw, said, hashlib.sha256).hexdigest()
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
    if not _is_pem(raw) and (why := _public_form(raw, Path(path).expanduser())):
        raise DispatchTableError(code="PLAN_KEY_PUBLIC", value=str(path), limit=why)
    return raw


def _is_pem(raw: bytes) -> bool:
    """PEM, also behind a byte-order mark, a comment or another block, or written in UTF-16."""
    return _BEGIN in raw.replace(b"\0", b"")


def _public_form(raw: bytes, path: Path) -> str:
    """As what a file that is no PEM is, or may be, a public key; empty for a secret."""
    text = raw.replace(b"\0", b"").strip()
    if found := _PUBLIC_WORDS.search(text):
        return f"it says {found[0].decode('ascii', 'replace').strip()!r}"
    for form in (raw, *_decoded(text)):
        # A public key in DER: one SEQUENCE to the very end, an algorithm inside.
        if len(form) > 2 and form[0] == 0x30 and _der_length(form) == len(form):
            return "it is DER"
    if any(len(form) in _RAW for form in (raw, *_decoded(text))) and path.stat().st_mode & 0o004:
        return "everybody can read it, and it is as long as a public key"
    return ""


def _decoded(text: bytes) -> list[bytes]:
    """What a text stands for, where it is hexadecimal or base64."""
    joined, found = b"".join(text.split()), []
    for decode in (bytes.fromhex, _base64):
        try:
            found.append(decode(joined.decode("ascii")))
        except (ValueError, binascii.Error):
            continue
    return found


def _base64(text: str) -> bytes:
    padded = text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)
    return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)


def _der_length(form: bytes) -> int:
    """How long a DER element says it is, its head included."""
    first = form[1]
    if first < 0x80:
        return 2 + first
    count = first & 0x7F
    return 2 + count + int.from_bytes(form[2 : 2 + count], "big") if 0 < count < 5 else -1


def _private(raw: bytes, path: str | Path) -> Any:
    crypto = _crypto()
    try:
        found: Any = crypto.load_pem_private_key(raw[raw.index(_BEGIN) :], password=None)
    except (ValueError, TypeError) as error:  # a public key, damaged, encrypted
        raise _unusable(path, str(error), "an ed25519 private key in PEM form, without a password") from None
    return _ed25519(found, path, "an ed25519 private key in PEM form")


def _public(raw: bytes, path: str | Path) -> Any:
    crypto = _crypto()
    try:
        body = raw[raw.index(_BEGIN) :]
        try:
            found: Any = crypto.load_pem_public_key(body)
        except ValueError:
            found = crypto.load_pem_private_key(body, password=None).public_key()
    except (ValueError, TypeError) as error:
        raise _unusable(path, str(error), "an ed25519 key in PEM form") from None
    return _ed25519(found, path, "an ed25519 key in PEM form")


def _ed25519(found: Any, path: str | Path, limit: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    if not isinstance(found, (Ed25519PrivateKey, Ed25519PublicKey)):
        raise _unusable(path, type(found).__name__.lstrip("_"), limit)
    return found


def _unusable(path: str | Path, why: str, limit: str) -> DispatchTableError:
    return DispatchTableError(
        f"the key {path} cannot be used: {why}; expected {limit}", code="CONFIG_INVALID", value=str(path), limit=limit
    )


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise DispatchTableError(
            "an ed25519 key needs the cryptography package", code="BACKEND_NOT_INSTALLED", value="cryptography",
            hint="pip install 'layerzero-core[signing]', or use a shared secret",
        ) from None  # fmt: skip
    return serialization


def _refused(why: str) -> DispatchTableError:
    return DispatchTableError(why, code="PLAN_SIGNATURE_INVALID", value=why)
