"""Quantization in fewer passes over memory; bit for bit the reference's codes, scales and values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from layerzero.backends.reference.quantize import E2M1_VALUES, LARGEST, NF4_VALUES, group_view, quantized
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, QuantScheme

_FP8 = {QuantFormat.FP8_E4M3: torch.float8_e4m3fn, QuantFormat.FP8_E5M2: torch.float8_e5m2}
_BINS = 512  # of [-1, 1]: two midpoints of NF4 never share one


def quantize(x: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """Every format; the encoding writes over its own scratch."""
    return quantized(x.to(torch.float32), scheme, _encode, x.dtype)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """The two codes of a byte are looked up at once, as one eight-byte number."""
    if qt.fmt is QuantFormat.INT8 and qt.zero_point is None and qt.scale.ndim == 0:  # one step for all: nothing is cut
        values = qt.data * qt.scale  # in float32, the dtype of the step
        return values if dtype is values.dtype else values.to(dtype or qt.dtype)
    if qt.traits.packed:
        table = _pairs(qt.fmt, qt.data.device)
        values = table.index_select(0, qt.data.reshape(-1).to(torch.int32)).view(torch.float32)
    else:
        values = qt.data.to(torch.float32)
    values = group_view(values.reshape(qt.shape), tuple(qt.scale.shape))
    if qt.zero_point is not None:
        values = values.sub_(qt.zero_point.unsqueeze(-1))
    scale = qt.scale.to(torch.float32)
    if qt.tensor_scale is not None:
        scale = scale * qt.tensor_scale
    scale = scale.unsqueeze(-1)
    values = values * scale if scale.requires_grad else values.mul_(scale)
    return values.reshape(qt.shape).to(dtype or qt.dtype)


def _encode(x: Tensor, fmt: QuantFormat, zero_point: Tensor | None) -> Tensor:
    if fmt in _FP8:
        largest = torch.finfo(_FP8[fmt]).max
        return x.clamp_(-largest, largest).to(_FP8[fmt])
    if not (x.is_cuda and fmt in LARGEST and zero_point is None and fmt is not QuantFormat.NF4):
        x.nan_to_num_(nan=0.0)  # CUDA makes integer zeros of NaN, other devices anything
    if fmt is QuantFormat.NF4:
        return _encode_nf4(x)
    if fmt not in LARGEST:
        return _encode_e2m1(x)
    whole = x.round_()  # symmetric: the scale keeps it within a rounding of the largest code
    if zero_point is not None:
        whole = whole.add_(zero_point.unsqueeze(-1)).clamp_(-LARGEST[fmt] - 1.0, LARGEST[fmt])
    codes = whole.to(torch.int8)
    return codes if fmt is QuantFormat.INT8 else codes.view(torch.uint8).bitwise_and_(0xF)


def _encode_e2m1(x: Tensor) -> Tensor:
    """In each range of one step a rounding to even gives the code, so that ties fall to the even code too."""
    sign = torch.signbit(x).to(torch.uint8) << 3
    size = x.abs_().clamp_(max=E2M1_VALUES[-1])
    halves, ones, twos = (size * 2.0).round_(), size.round().add_(2.0), (size * 0.5).round_().add_(4.0)
    return torch.where(size < 2.0, halves, torch.where(size < 4.0, ones, twos)).to(torch.uint8).bitwise_or_(sign)


def _encode_nf4(x: Tensor) -> Tensor:
    """A bin of [-1, 1] has one code, or two with a midpoint between them."""
    first, midpoint = _nf4_bins(x.device)
    place = (x + 1.0).mul_(_BINS / 2).to(torch.int32).clamp_(0, _BINS - 1).view(-1)
    above = x > midpoint.index_select(0, place).view(x.shape)
    return first.index_select(0, place).view(x.shape).add_(above)


@lru_cache(maxsize=64)
def _pairs(fmt: QuantFormat, device: torch.device) -> Tensor:
    """The float32 values of both halves of every byte, side by side, read as one int64."""
    if fmt is QuantFormat.NF4:
        values = torch.tensor(NF4_VALUES)
    elif fmt is QuantFormat.INT4:
        values = torch.tensor([float(code if code < 8 else code - 16) for code in range(16)])
    else:
        values = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)))
    byte = torch.arange(256)
    table = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1).contiguous()
    return table.view(torch.int64).reshape(-1).to(device)


@lru_cache(maxsize=16)
def _nf4_bins(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each bin its first code, and the midpoint in it (2 where there is none), rounded down to float32.

    x > m and x > floor(m) are the same for a float32 x, so nothing is lost.
    """
    table = torch.tensor(NF4_VALUES, dtype=torch.float64)
    midpoints = (table[1:] + table[:-1]) / 2
    near = midpoints.to(torch.float32)
    down = torch.where(near.to(torch.float64) > midpoints, torch.nextafter(near, torch.tensor(-2.0)), near)
    edges = torch.arange(_BINS, dtype=torch.float64) / (_BINS / 2) - 1.0
    first = torch.bucketize(edges, midpoints).to(torch.uint8)
    inside = torch.full((_BINS,), 2.0)
    inside[((midpoints + 1.0) * (_BINS / 2)).to(torch.int64)] = down
    return first.to(device), inside.to(device)
