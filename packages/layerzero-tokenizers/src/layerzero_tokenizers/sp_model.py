"""Reads the few fields of a SentencePiece model file that matter here. The format is protobuf; no library is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from layerzero.errors import invalid

_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user_defined", 5: "unused", 6: "byte"}
_MODELS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float
    type: str


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a model file says, and the raw bytes of its parts for hashing."""

    pieces: tuple[Piece, ...]
    model_type: str
    whitespace_as_suffix: bool
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    normalizer_bytes: bytes
    trainer_bytes: bytes
    rest_bytes: bytes


def parse(data: bytes) -> SentencePieceModel:
    """Raises InvalidInputError for bytes that are no SentencePiece model."""
    try:
        return _parse(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        message = f"not a SentencePiece model: {error}"
        raise invalid("TOKENIZER_UNKNOWN", "damaged file", "a model file", message) from None


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer, normalizer, rest = b"", b"", b""
    for number, value in _fields(data):
        if number == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append(Piece(entry.get(1, b"").decode(), score, _TYPES[entry.get(3, 1)]))
        elif number == 2:
            trainer += value
        elif number == 3:
            normalizer += value
        else:
            rest += repr((number, value)).encode()
    if not pieces:
        raise ValueError("it has no vocabulary")
    told, spec = dict(_fields(trainer)), dict(_fields(normalizer))
    return SentencePieceModel(
        tuple(pieces), _MODELS[told.get(3, 1)], bool(told.get(24, 0)), bool(told.get(35, 0)), spec.get(2, b""),
        bool(spec.get(3, 1)), bool(spec.get(4, 1)), bool(spec.get(5, 1)), normalizer, trainer, rest,
    )  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value): whole numbers for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value: Any
            value, at = _varint(data, at)
        elif wire == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise ValueError("it ends early")
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
