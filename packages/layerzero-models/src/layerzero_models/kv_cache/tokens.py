"""Tokens of many sequences, padded or packed: checks, and the way from one form to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.checks import expect_tensor
from layerzero.model.describe import dtype_name


def whole_numbers(given: Any, name: str, count: int) -> tuple[int, ...]:
    """`count` whole numbers, none negative."""
    try:
        found = tuple(given)
        right = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found)
    except TypeError:
        found, right = (), False
    if not right or len(found) != count:
        raise invalid("VALUE_INVALID", f"{name} {given!r}", f"{count} whole numbers from 0")
    return found


def pack(padded: Tensor, lens: Sequence[int]) -> Tensor:
    """[B, S, ...] to [sum(lens), ...]: the first lens[b] of each row."""
    if all(length == padded.shape[1] for length in lens):
        return padded.flatten(0, 1)
    return torch.cat([row[:length] for row, length in zip(padded, lens, strict=True)])


def unpack(packed: Tensor, lens: Sequence[int], width: int) -> Tensor:
    """The inverse: [B, width, ...], zeros behind each sequence."""
    if all(length == width for length in lens):
        return packed.reshape(len(lens), width, *packed.shape[1:])
    out = packed.new_zeros((len(lens), width, *packed.shape[1:]))
    start = 0
    for row, length in enumerate(lens):
        out[row, :length] = packed[start : start + length]
        start += length
    return out


def packed_tokens(
    given: Tensor,
    name: str,
    wanted: tuple[int, int, int, torch.dtype, torch.device],
    lens: Sequence[int] | None,
    layout: str,
) -> tuple[Tensor, tuple[int, ...]]:
    """New tokens as [tokens, heads, width], and how many each sequence gets; anything that does not fit is refused."""
    batch, heads, width, dtype, device = wanted
    tensor = expect_tensor(given, name)
    if layout not in ("BHSD", "BSHD"):
        raise invalid("LAYOUT_UNKNOWN", str(layout), "BHSD, BSHD")
    if tensor.ndim not in (3, 4):
        raise invalid("RANK_INVALID", tensor.ndim, "4, or 3 for packed tokens")
    if tensor.dtype is not dtype:
        limit = str(dtype).removeprefix("torch.")
        raise invalid("KV_CACHE_DTYPE_MISMATCH", f"{dtype_name(tensor)} ({name})", limit)
    if tensor.device != device and (tensor.device.type != device.type or device.index is not None):
        raise invalid("DEVICE_MIXED", f"{name} on {tensor.device}, cache on {device}")
    if tensor.ndim == 4:
        tokens_first = tensor.transpose(1, 2) if layout == "BHSD" else tensor
        _expect(tokens_first, name, (batch, tokens_first.shape[1], heads, width))
        new = (tokens_first.shape[1],) * batch if lens is None else whole_numbers(lens, "lens", batch)
        if max(new) > tokens_first.shape[1]:
            raise invalid("SHAPE_INVALID", f"lens {new}", f"{tokens_first.shape[1]} tokens")
        return pack(tokens_first, new), new
    new = (1,) * batch if lens is None else whole_numbers(lens, "lens", batch)
    _expect(tensor, name, (sum(new), heads, width))
    return tensor, new


def _expect(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise invalid(
            "SHAPE_INVALID", f"{name} {tuple(tensor.shape)}", str(shape), f"{name} has shape {tuple(tensor.shape)}"
        )
