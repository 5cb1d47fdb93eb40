"""How tokens come into a KV cache, padded or packed, and how it stores one: as it is, or quantized with its scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero import dequantize, quantize
from layerzero.errors import invalid
from layerzero.model.checks import expect_shape, expect_tensor
from layerzero.model.describe import dtype_name
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits

_FP8 = {QuantFormat.FP8_E4M3: torch.float8_e4m3fn, QuantFormat.FP8_E5M2: torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One stored number array of each token and head: `width` numbers of `dtype`."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Codec:
    """From tokens [T, H, D] to the planes that are stored, and back.

    scheme   None stores tokens as they are; else each head of each token is quantized with scales of its own
    fixed    one scale for the whole cache instead (FP8): known beforehand, so that a kernel may read the codes
    """

    width: int
    dtype: torch.dtype
    scheme: QuantScheme | None = None
    fixed: float | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        """What is stored for each token and head."""
        if self.scheme is None:
            return (Plane(self.width, self.dtype),)
        traits = self.scheme.traits
        codes = Plane(self.width // 2 if traits.packed else self.width, getattr(torch, traits.data_dtype))
        if self.fixed is not None:
            return (codes,)
        count = 1 if self.scheme.block_size is None else self.width // self.scheme.block_size
        return codes, Plane(count, getattr(torch, traits.scale_dtype))

    def encode(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The planes of tokens [T, H, D], each [T, H, width]."""
        if self.scheme is None:
            return (tokens,)
        if self.fixed is not None:
            kind = _FP8[self.scheme.fmt]
            largest = torch.finfo(kind).max
            wide = tokens.to(torch.float32).masked_fill(tokens.isinf(), torch.nan)  # clamped, it would look sound
            return ((wide / self.fixed).clamp(-largest, largest).to(kind),)
        made = quantize(
            tokens,
            self.scheme.fmt.value,
            granularity=self.scheme.granularity,
            block_size=self.scheme.block_size,
        )
        return made.data, made.scale

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        """Tokens from planes of any leading shape, in the dtype of the cache."""
        if self.scheme is None:
            return planes[0]
        data = planes[0]
        shape = (*data.shape[:-1], self.width)
        if self.fixed is not None:
            return (data.to(torch.float32) * self.fixed).to(self.dtype)
        fmt, granularity, block = self.scheme.fmt, self.scheme.granularity, self.scheme.block_size
        return dequantize(QuantizedTensor(data, planes[1], fmt, granularity, shape, self.dtype, block))


def make_codec(width: int, dtype: torch.dtype, quant: str | None, fixed: float | None) -> Codec:
    """The codec of keys or values. Raises QUANT_FORMAT_UNSUPPORTED, QUANT_SCALE_LAYOUT, DIM_NOT_MULTIPLE."""
    if not dtype.is_floating_point:
        raise invalid("DTYPE_UNSUPPORTED", str(dtype), "a floating dtype")
    if quant is None:
        if fixed is not None:
            raise invalid("QUANT_SCALE_LAYOUT", "k_scale or v_scale", "a cache without quant")
        return Codec(width, dtype)
    known, traits = format_traits(quant)
    if traits.tensor_scale:
        raise invalid(
            "QUANT_FORMAT_UNSUPPORTED",
            f"{known.value} (its tensor scale must be known before the first token)",
            "int8, int4, fp8_e4m3, fp8_e5m2, mxfp4, nf4",
        )
    scheme = QuantScheme(known, "block" if traits.block_only else "channel")
    scheme.scales_for((1, width))
    if fixed is not None:
        if known not in _FP8:
            raise invalid("QUANT_SCALE_LAYOUT", "one scale for the cache", "an FP8 cache")
        if not isinstance(fixed, (int, float)) or not 0.0 < fixed < float("inf"):
            raise invalid("SCALE_INVALID", str(fixed))
    return Codec(width, dtype, scheme, fixed)


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
        expect_shape(tokens_first, name, (batch, tokens_first.shape[1], heads, width))
        new = (tokens_first.shape[1],) * batch if lens is None else whole_numbers(lens, "lens", batch)
        if max(new) > tokens_first.shape[1]:
            raise invalid("SHAPE_INVALID", f"lens {new}", f"{tokens_first.shape[1]} tokens")
        return pack(tokens_first, new), new
    new = (1,) * batch if lens is None else whole_numbers(lens, "lens", batch)
    expect_shape(tensor, name, (sum(new), heads, width))
    return tensor, new
