"""What `lz.tokenize` gives beside plain ids: tokens with offsets, padded batches; cutting and filling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import invalid


class Tokens(NamedTuple):
    """Ids of one text and, for each, its (start, end) in characters of the text; special tokens have (0, 0)."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts as one int64 matrix; `attention_mask` is 1 at tokens and 0 at padding; offsets where asked for."""

    input_ids: Tensor
    attention_mask: Tensor
    offsets: tuple[tuple[tuple[int, int], ...], ...] | None = None


def cut(out: Any, max_length: int, side: str, around: tuple[int, int]) -> Any:
    """At most `max_length` ids; the `around` (before, after) special tokens stay, the text's own are cut."""
    if type(max_length) is not int or max_length < sum(around):
        message = f"max_length {max_length} has no room for {sum(around)} special tokens"
        raise invalid("VALUE_INVALID", str(max_length), f"an int of at least {sum(around)}", message)
    if side not in ("left", "right"):
        raise invalid("VALUE_INVALID", str(side), "truncation_side 'left' or 'right'")
    if isinstance(out, Tokens):
        return Tokens(*(_cut(row, max_length, side, around) for row in out))
    if out and isinstance(out[0], (list, Tokens)):
        return [cut(row, max_length, side, around) for row in out]
    return _cut(out, max_length, side, around)


def _cut(row: list[Any], max_length: int, side: str, around: tuple[int, int]) -> list[Any]:
    if len(row) <= max_length:
        return row
    before, after = around
    end, room = len(row) - after, max_length - before - after
    kept = row[before : before + room] if side == "right" else row[end - room : end]
    return [*row[:before], *kept, *row[end:]]


def pad(out: Any, padding: str | int, side: str, pad_id: int | None) -> TokenBatch:
    """One matrix, filled up to the longest text or to a length; texts longer than that are refused."""
    if pad_id is None:
        raise invalid("VALUE_INVALID", "pad_id None", "a token id", "this tokenizer has no padding token")
    if side not in ("left", "right"):
        raise invalid("VALUE_INVALID", str(side), "padding_side 'left' or 'right'")
    alone = isinstance(out, Tokens) or not out or isinstance(out[0], int)
    rows = [out] if alone else out
    ids = [row.ids if isinstance(row, Tokens) else row for row in rows]
    longest = max((len(row) for row in ids), default=0)
    if padding == "longest":
        width = longest
    elif type(padding) is int and padding >= longest:
        width = padding
    else:
        raise invalid("VALUE_INVALID", f"padding={padding!r}", f"'longest' or an int of at least {longest}")
    filled = torch.full((len(ids), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(ids), width), dtype=torch.int64)
    spans = []
    for index, (row, given) in enumerate(zip(ids, rows, strict=True)):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        filled[index, at] = torch.tensor(row, dtype=torch.int64)
        mask[index, at] = 1
        if isinstance(given, Tokens):
            places = [(0, 0)] * width
            places[at] = given.offsets
            spans.append(tuple(places))
    return TokenBatch(filled, mask, tuple(spans) or None)
