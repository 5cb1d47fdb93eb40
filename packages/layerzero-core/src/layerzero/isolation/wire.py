"""What crosses the channel: frames of a fixed header and a JSON body, and the values of a call as such data.

    magic 4 | version 1 | kind 1 | zero 2 | sequence 8 | length 4 | crc32 4        little-endian, 24 bytes

The checksum covers the header before it and the body. A frame that is wrong in any part is refused whole: the other
side is then not to be believed, and its process is ended. Nothing here can execute anything.

A tensor travels as {"t": [arena, offset, bytes, dtype, shape, strides]}; its bytes lie in that arena. Everything else
is a tagged value: floats as hexadecimal text, so that every bit and every infinity arrives, tuples told from lists,
torch dtypes by name. What has no form here (a generator, an object of another library) is refused before anything
is sent. `pack` and `unpack` take the function that places a tensor, or finds one again.
"""

from __future__ import annotations

import enum
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.reasons import Reason, reason

MAGIC = b"LZic"
VERSION = 1
MAX_BODY = 4 << 20

_FIELDS = struct.Struct("<4sBBHQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


class Kind(enum.IntEnum):
    """What a frame is. The parent asks (even numbers), the child answers (odd ones)."""

    HELLO = 1  # child: I am up
    LOAD = 2  # parent: import this adapter
    LOADED = 3
    CALL = 4  # parent: run it
    RESULT = 5
    RAISED = 7  # child: it raised, or could not be imported
    ROOM = 9  # child: the results need this much more room; make it and ask again
    PING = 10
    PONG = 11


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


MAX_ITEMS = 65_536
MAX_DEPTH = 16
MAX_RANK = 16
_BIG = 2**62


class Unsendable(TypeError):
    """A value without a form on the channel."""


class Malformed(ValueError):
    """A description that cannot be true: it came from the other side and is not believed."""


class Placed(NamedTuple):
    """Where a tensor lies and how to see it."""

    arena: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_json(self) -> list[Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.arena, self.offset, self.nbytes, dtype, list(self.shape), list(self.strides)]


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a value, however deep in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors_in(item)]
    return []


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last that a strided view touches."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def pack(value: Any, place: Callable[[Tensor], Placed], depth: int = 0) -> Any:
    """The JSON form of a value; `place` puts a tensor's bytes into an arena."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        return {"t": place(value).to_json()}
    if isinstance(value, int):
        if not -_BIG < value < _BIG:
            raise Unsendable(f"the number {value}")
        return int(value)
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, torch.dtype):
        return {"d": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        if depth >= MAX_DEPTH or len(value) > MAX_ITEMS:
            raise Unsendable(f"a {type(value).__name__} of {len(value)} items at depth {depth}")
        items = [pack(item, place, depth + 1) for item in value]
        return {"u": items} if isinstance(value, tuple) else {"l": items}
    raise Unsendable(type(value).__name__)


def unpack(data: Any, find: Callable[[Placed], Tensor], depth: int = 0) -> Any:
    """The value of a JSON form. Raises Malformed for anything `pack` would not have written."""
    if data is None or isinstance(data, (bool, str)) or type(data) is int:
        return data
    if not isinstance(data, dict) or len(data) != 1 or depth > MAX_DEPTH:
        raise Malformed(f"not a value: {str(data)[:80]}")
    ((tag, inner),) = data.items()
    if tag == "t":
        return find(_placed(inner))
    if tag == "f" and isinstance(inner, str):
        try:
            return float.fromhex(inner)
        except (ValueError, OverflowError):
            raise Malformed(f"not a number: {inner[:80]!r}") from None
    if tag == "d" and isinstance(inner, str):
        return _dtype(inner)
    if tag in ("u", "l") and isinstance(inner, list) and len(inner) <= MAX_ITEMS:
        items = [unpack(item, find, depth + 1) for item in inner]
        return tuple(items) if tag == "u" else items
    raise Malformed(f"not a value: {str(data)[:80]}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(found, torch.dtype):
        raise Malformed(f"not a dtype: {name[:80]!r}")
    return found


def _placed(inner: Any) -> Placed:
    """A place whose numbers agree with each other; whether it lies inside its arena is for the arena to say."""
    if not isinstance(inner, list) or len(inner) != 6:
        raise Malformed(f"not a tensor: {str(inner)[:80]}")
    arena, offset, nbytes, name, shape, strides = inner
    if not (isinstance(arena, str) and isinstance(name, str) and isinstance(shape, list) and isinstance(strides, list)):
        raise Malformed(f"not a tensor: {str(inner)[:80]}")
    numbers = [offset, nbytes, *shape, *strides]
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        raise Malformed(f"shape {shape} with strides {strides}")
    if not all(type(item) is int and 0 <= item < _BIG for item in numbers):
        raise Malformed(f"not sizes: {str(numbers)[:120]}")
    dtype = _dtype(name)
    if math.prod(shape) and span(shape, strides) * dtype.itemsize > nbytes:
        raise Malformed(f"shape {shape} with strides {strides} does not fit into {nbytes} bytes")
    return Placed(arena, offset, nbytes, dtype, tuple(shape), tuple(strides))
