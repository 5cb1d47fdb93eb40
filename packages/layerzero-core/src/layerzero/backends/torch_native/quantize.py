"""Quantization in fewer passes over memory, bit for bit the reference's; products of torch with quantized weights."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.feed_forward import activate
from layerzero.backends.reference.quantize import E2M1_VALUES, LARGEST, NF4_VALUES, decode, group_view, quantized
from layerzero.model.enums import QuantFormat
from layerzero.model.packed import PackedWeight, activation_scheme
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
        first, midpoint = _nf4_bins(x.device)  # a bin of [-1, 1] has one code, or two with a midpoint between them
        place = (x + 1.0).mul_(_BINS / 2).to(torch.int32).clamp_(0, _BINS - 1).view(-1)
        above = x > midpoint.index_select(0, place).view(x.shape)
        return first.index_select(0, place).view(x.shape).add_(above)
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


@lru_cache(maxsize=64)
def _pairs(fmt: QuantFormat, device: torch.device) -> Tensor:
    """The float32 values of both halves of every byte, side by side, read as one int64."""
    values = decode(torch.arange(16, dtype=torch.uint8), fmt)
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


# -- products: each takes the canonical arguments of `linear` ----------------------------------------------------
# None of torch's functions checks its sizes well (int8 rows whose length is no multiple of 8 are read beyond their
# end), so the limits in capabilities.json are part of their correctness.
Weight = QuantizedTensor | PackedWeight


def dequantized(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Widen the weight, then one product, in float32: a weight rounded to 16 bits would take results out of bounds."""
    source = _source(weight)
    dtype = torch.float32
    rows = x.to(dtype)
    if isinstance(weight, PackedWeight) and weight.act is not None:
        stored = dequantize(quantize(x, activation_scheme(source.fmt)), dtype)
        rows = rows + (stored - rows).detach() if x.requires_grad else stored
    out = F.linear(rows, dequantize(source, dtype))
    return _finished(out.to(torch.float32), bias, activation, x)


def int8_rows(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """`_weight_int8pack_mm`: codes are widened in registers. For few rows; beyond them a widened weight pays."""
    source = _source(weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    codes, scale = source.data.contiguous(), _row_scale(source)
    if x.dtype is not torch.bfloat16:
        return _finished(torch._weight_int8pack_mm(rows.to(torch.float32), codes, scale), bias, activation, x)
    # The bfloat16 form wants bfloat16 scales; what their rounding takes away is put back afterwards.
    rounded = scale.to(torch.bfloat16)
    out = torch._weight_int8pack_mm(rows, codes, rounded).to(torch.float32)
    return _finished(out * (scale / rounded.to(torch.float32)), bias, activation, x)


def pack_int4_tiles(source: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Codes from 0 to 15 in the order of torch's kernel, and for each block of a row its scale and its value of code 8.

    The kernel computes (code - 8) * scale + value; our signed code is (code - 8), so the value is -zero_point * scale.
    """
    codes = torch.stack((source.data & 0xF, source.data >> 4), dim=-1).flatten(-2) ^ 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    scale = source.scale.to(torch.float32)
    offset = torch.zeros_like(scale) if source.zero_point is None else -source.zero_point * scale
    return packed, torch.stack((scale, offset), dim=-1).transpose(0, 1).contiguous()


def int4_tiles(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """`_weight_int4pack_mm_for_cpu` in float32."""
    packed, scales = weight.ready()
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, weight.source.block_size, scales)
    return _finished(out, bias, activation, x)


def int8_dynamic(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x are quantized too; the product of the codes is exact in int32."""
    source = _source(weight)
    codes, row_scale = _quantized_rows(x, source.fmt)
    out = torch._int_mm(codes, source.data.t()).to(torch.float32)
    return _finished(out * row_scale * _row_scale(source), bias, activation, x)


def fp8_scaled(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """`_scaled_mm` of codes alone, in float32; both scales follow after it."""
    source = _source(weight)
    codes, row_scale = _quantized_rows(x, source.fmt)
    one = torch.ones((), device=x.device)
    out = torch._scaled_mm(codes, source.data.t(), one, one, out_dtype=torch.float32)
    return _finished(out * row_scale * _row_scale(source), bias, activation, x)


def fp8_rowwise(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """`_scaled_mm` with the scales of rows and channels inside, which gives bfloat16."""
    source = _source(weight)
    codes, row_scale = _quantized_rows(x, source.fmt)
    channel = _row_scale(source).reshape(1, -1)
    out = torch._scaled_mm(codes, source.data.t(), row_scale, channel, bias=bias, out_dtype=torch.bfloat16)
    return _finished(out, None, activation, x)


def _source(weight: Weight) -> QuantizedTensor:
    return weight if isinstance(weight, QuantizedTensor) else weight.source


def _row_scale(source: QuantizedTensor) -> Tensor:
    """One scale for each row of the weight, [N], whether they differ or not."""
    return source.scale.reshape(-1).expand(source.shape[0]).contiguous()


def _quantized_rows(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    made = quantize(x.reshape(-1, x.shape[-1]), activation_scheme(fmt))
    return made.data, made.scale


def _finished(out: Tensor, bias: Tensor | None, activation: str | None, x: Tensor) -> Tensor:
    """Bias and activation, then the shape and dtype of the result."""
    if bias is not None:
        out = out + bias
    if activation is not None:
        out = activate(out, activation)
    return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)
