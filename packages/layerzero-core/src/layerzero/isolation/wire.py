"""The frame of the channel: a fixed header and a JSON body.

    magic 4 | version 1 | kind 1 | zero 2 | sequence 8 | length 4 | crc32 4        little-endian, 24 bytes

The checksum covers the header before it and the body. A frame that is wrong in any part is refused whole: the other
side is then not to be believed, and its process is ended. Nothing here can execute anything.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from typing import Any, NamedTuple

from layerzero.reasons import Reason, reason

MAGIC = b"LZic"
VERSION = 1
MAX_BODY = 4 << 20
MAX_DEPTH = 24

_FIELDS = struct.Struct("<4sBBHQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


class Kind(enum.IntEnum):
    """What a frame is. The parent asks (even numbers), the child answers (odd ones)."""

    HELLO = 1  # child: I am up; versions
    LOAD = 2  # parent: import this adapter
    LOADED = 3
    CALL = 4  # parent: run it
    RESULT = 5
    RAISED = 7  # child: it raised, or could not be imported
    ROOM = 9  # child: the results need this much more room; make it and ask again
    PING = 10
    PONG = 11
    BYE = 12  # parent: end yourself


class WireError(ValueError):
    """Bytes that are not a frame of ours."""


class Head(NamedTuple):
    """A header that has been checked, but for its checksum, which needs the body."""

    kind: Kind
    sequence: int
    length: int
    raw: bytes


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    sequence: int
    body: dict[str, Any]


def encode(kind: Kind, sequence: int, body: dict[str, Any]) -> bytes:
    """The bytes of a message. Raises WireError for a body that is too large or holds what JSON does not know."""
    try:
        data = json.dumps(body, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the message cannot be written: {error}") from None
    if len(data) > MAX_BODY:
        raise WireError(f"a message of {len(data)} bytes, allowed {MAX_BODY}")
    fields = _FIELDS.pack(MAGIC, VERSION, kind, 0, sequence, len(data))
    return b"".join((fields, _CRC.pack(zlib.crc32(data, zlib.crc32(fields))), data))


def head(raw: bytes) -> Head:
    """Check a header before its body is read, so that a wild length is never waited for."""
    if len(raw) != HEADER_BYTES:
        raise WireError(f"a header of {len(raw)} bytes, expected {HEADER_BYTES}")
    magic, version, kind, zero, sequence, length = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise WireError(f"begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"protocol {version}, expected {VERSION}")
    if zero or length > MAX_BODY:
        raise WireError(f"claims {length} bytes, allowed {MAX_BODY}" if length > MAX_BODY else "reserved bits are set")
    try:
        return Head(Kind(kind), sequence, length, raw)
    except ValueError:
        raise WireError(f"unknown kind {kind}") from None


def decode(first: Head, data: bytes) -> Frame:
    """The message of a checked header and its body."""
    if len(data) != first.length:
        raise WireError(f"a body of {len(data)} bytes, announced {first.length}")
    (wanted,) = _CRC.unpack_from(first.raw, _FIELDS.size)
    if zlib.crc32(data, zlib.crc32(first.raw[: _FIELDS.size])) != wanted:
        raise WireError("the checksum is wrong")
    try:
        body = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {str(error)[:80]}") from None
    if not isinstance(body, dict):
        raise WireError(f"the body is a {type(body).__name__}, expected an object")
    return Frame(first.kind, first.sequence, body)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


class IsolationFault(RuntimeError):
    """The child crashed, hung or spoke nonsense; `reason` says which. Dispatch turns it into a fallback."""

    def __init__(self, why: Reason) -> None:
        super().__init__(str(why))
        self.reason = why


class ChildError(IsolationFault):
    """The kernel raised inside the child, which is well; the words are the kernel's own."""


class ChildOutOfMemory(ChildError, MemoryError):
    """The child ran out of host or device memory: pressure, not the kernel's fault."""


def fault(code: str, value: object = None, limit: object = None, *, detail: str = "") -> IsolationFault:
    """A fault with the words of its reason code."""
    return IsolationFault(reason(code, value, limit, detail=detail))
