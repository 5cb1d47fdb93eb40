"""Quantize to and from INT8, INT4, FP8, MXFP4, NVFP4 and NF4.

Scaling is symmetric: a group's largest magnitude maps to the largest code. A group of zeros gets scale 1. A NaN or
infinity poisons the scale of its group, so that it stays visible after dequantization.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.errors import InvalidInputError
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, format_traits, resolve_granularity, scale_shape
from layerzero.reasons import ReasonCode

__all__ = ["E2M1_VALUES", "NF4_VALUES", "dequantize", "quantize"]

# Magnitudes of the codes 0..7 of E2M1; bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX_EXPONENT = 2

# Quantiles of the normal distribution scaled to [-1, 1], with an exact zero (QLoRA).
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_LARGEST = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3: 448.0,
    QuantFormat.FP8_E5M2: 57344.0,
    QuantFormat.NF4: 1.0,
}
_E4M3_MAX = 448.0
_E8M0_BIAS = 127
_E8M0_NAN = 255


def quantize(x: Tensor, fmt: str, granularity: str) -> QuantizedTensor:
    """Quantize along the last axis; scales per "tensor", "channel" (row) or "block"."""
    known, traits = format_traits(fmt)
    granularity = resolve_granularity(known, granularity)
    if not x.dtype.is_floating_point:
        raise InvalidInputError(code=ReasonCode.DTYPE_UNSUPPORTED, value=x.dtype, limit="floating point")
    shape = tuple(x.shape)
    if traits.packed and (not shape or shape[-1] % 2):
        raise InvalidInputError(code=ReasonCode.DIM_NOT_MULTIPLE, value=f"last axis of {shape}", limit=2)
    block_size = traits.block_size if granularity == "block" else None
    groups = _grouped(x.detach().to(compute_dtype(x)).contiguous(), scale_shape(shape, granularity, block_size))
    peak = groups.abs().amax(dim=-1) if groups.shape[-1] else groups.new_zeros(groups.shape[:-1])

    tensor_scale: Tensor | None = None
    if known is QuantFormat.MXFP4:
        scale, step = _e8m0_scale(peak)
    elif known is QuantFormat.NVFP4:
        scale, tensor_scale, step = _e4m3_scale(peak)
    else:
        scale = torch.where(peak == 0, 1.0, peak / _LARGEST[known]).to(torch.float32)
        step = scale
    # A scale that underflowed to zero stands for zeros; dividing by it would not.
    divisor = torch.where(step == 0, 1.0, step).unsqueeze(-1)
    data = _encode(groups / divisor, known).reshape(shape)
    if traits.packed:
        data = data[..., 0::2] | (data[..., 1::2] << 4)
    return QuantizedTensor(data, scale, known, granularity, shape, x.dtype, block_size, None, tensor_scale)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """The values a quantized tensor stands for, in `dtype` (None: the dtype it was made from)."""
    _, traits = format_traits(qt.fmt)
    codes = qt.data
    if traits.packed:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    values = _grouped(_decode(codes, qt.fmt), tuple(qt.scale.shape))
    if qt.zero_point is not None:
        values = values - qt.zero_point.to(torch.float32).unsqueeze(-1)
    scale = qt.scale.to(torch.float32)
    if qt.tensor_scale is not None:
        scale = scale * qt.tensor_scale
    return (values * scale.unsqueeze(-1)).reshape(qt.shape).to(dtype or qt.dtype)


def _grouped(x: Tensor, scales: tuple[int, ...]) -> Tensor:
    """View `x` as [*scales, elements that share a scale]."""
    if not scales:
        return x.reshape(-1)
    groups = scales[-1]
    return x.reshape(*scales, x.shape[-1] // groups if groups else 0)


def _e8m0_scale(peak: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two that puts the peak's exponent at E2M1's largest (OCP MX): stored and as a number."""
    exponent = torch.frexp(peak).exponent - 1 - E2M1_MAX_EXPONENT
    stored = (exponent + _E8M0_BIAS).clamp(0, 2 * _E8M0_BIAS)
    stored = torch.where(peak.isfinite(), stored, _E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)
    return stored, stored.to(torch.float32)


def _e4m3_scale(peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4's two levels: E4M3 per block, float32 per tensor, and the step size they make together."""
    largest = peak.amax() if peak.numel() else peak.new_zeros(())
    tensor_scale = torch.where(largest == 0, 1.0, largest / (E2M1_VALUES[-1] * _E4M3_MAX)).to(torch.float32)
    block = (peak / E2M1_VALUES[-1] / tensor_scale).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    return block, tensor_scale, block.to(torch.float32) * tensor_scale


def _encode(x: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt is QuantFormat.INT8:
        return x.round().clamp(-127, 127).to(torch.int8)
    if fmt is QuantFormat.INT4:
        return x.round().clamp(-7, 7).to(torch.int8).view(torch.uint8) & 0xF
    if fmt is QuantFormat.FP8_E4M3:
        return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    if fmt is QuantFormat.FP8_E5M2:
        return x.clamp(-57344.0, 57344.0).to(torch.float8_e5m2)
    if fmt is QuantFormat.NF4:
        table = x.new_tensor(NF4_VALUES)
        return torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return _encode_e2m1(x)


def _encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 code, ties to the even code, saturating at 6."""
    table = x.new_tensor(E2M1_VALUES)
    midpoints = (table[1:] + table[:-1]) / 2
    magnitude = x.abs()
    below = torch.bucketize(magnitude, midpoints)
    above = torch.bucketize(magnitude, midpoints, right=True)  # differs from `below` only on a tie
    code = torch.where(below % 2 == 0, below, above)
    return (code | (torch.signbit(x).to(code.dtype) << 3)).to(torch.uint8)


def _decode(codes: Tensor, fmt: QuantFormat) -> Tensor:
    if fmt is QuantFormat.INT4:
        return (codes.to(torch.int32) ^ 8).to(torch.float32) - 8.0  # two's complement of four bits
    if fmt is QuantFormat.NF4:
        return torch.tensor(NF4_VALUES, device=codes.device)[codes.long()]
    if fmt in (QuantFormat.MXFP4, QuantFormat.NVFP4):
        values = E2M1_VALUES + tuple(-value for value in E2M1_VALUES)
        return torch.tensor(values, device=codes.device)[codes.long()]
    return codes.to(torch.float32)
