"""Quantize to and from INT8, INT4, FP8, MXFP4, NVFP4 and NF4.

Symmetric scaling maps a group's largest magnitude to the largest code, asymmetric scaling (integers only) its smallest
and largest number to the ends of the codes. Rounding is to nearest, ties to even. A group of zeros gets scale 1, and no
float32 scale is subnormal: a step of 2**-126 is exact enough for numbers that small. A NaN or infinity poisons the
scale of its group, so that it stays visible after dequantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype, number, to_odd
from layerzero.errors import InvalidInputError
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, QuantScheme, format_traits
from layerzero.reasons import ReasonCode

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

LARGEST = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3: 448.0,
    QuantFormat.FP8_E5M2: 57344.0,
    QuantFormat.NF4: 1.0,
}
_E8M0_BIAS = 127
_E8M0_NAN = 255
_TINY = 2.0**-126


def quantize(x: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """Quantize along the last axis; scales per tensor, per channel (row) or per block of a row."""
    if not x.dtype.is_floating_point:
        raise InvalidInputError(code=ReasonCode.DTYPE_UNSUPPORTED, value=x.dtype, limit="floating point")
    return quantized(x.to(compute_dtype(x)), scheme, _encode, x.dtype)


def quantized(
    x: Tensor,
    scheme: QuantScheme,
    encode: Callable[[Tensor, QuantFormat, Tensor | None], Tensor],
    dtype: torch.dtype,
) -> QuantizedTensor:
    """A wide `x`, which came in as `dtype`, by a function from numbers divided by their step to codes."""
    shape = tuple(x.shape)
    groups = group_view(x.detach().contiguous(), scheme.scales_for(shape))
    found = scales_of(groups, scheme)
    divisor = found.divisor if scheme.granularity == "tensor" else found.divisor.unsqueeze(-1)
    data = encode(groups / divisor, scheme.fmt, found.zero_point).view(shape)
    if scheme.traits.packed:
        data = data[..., 0::2] | (data[..., 1::2] << 4)
    fixed = (scheme.fmt, scheme.granularity, shape, dtype, scheme.block_size)
    return QuantizedTensor.fitting(data, found.scale, *fixed, found.zero_point, found.tensor_scale)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """The values a quantized tensor stands for, in `dtype` (None: the dtype it was made from).

    Computed in float32, for a float64 result in float64.
    """
    target = dtype or qt.dtype
    wide = torch.float64 if target is torch.float64 else torch.float32
    _, traits = format_traits(qt.fmt)
    codes = qt.data
    if traits.packed:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    values = group_view(decode(codes, qt.fmt), tuple(qt.scale.shape)).to(wide)
    if qt.zero_point is not None:
        values = values - qt.zero_point.to(wide).unsqueeze(-1)
    scale = qt.scale.to(torch.float32).to(wide)  # float8 widens in one step only to float32
    if qt.tensor_scale is not None:
        scale = scale * qt.tensor_scale.to(wide)
    return (values * scale.unsqueeze(-1)).reshape(qt.shape).to(target)


class Scales(NamedTuple):
    """What a group of numbers is stored with, and the number its members are divided by."""

    scale: Tensor
    divisor: Tensor
    zero_point: Tensor | None = None
    tensor_scale: Tensor | None = None


def scales_of(groups: Tensor, scheme: QuantScheme) -> Scales:
    """The scales of [..., elements that share one]."""
    if not scheme.symmetric:
        scale, zero_point = _affine(groups, LARGEST[scheme.fmt])
        return Scales(scale, scale, zero_point)
    if not groups.shape[-1]:
        peak = groups.new_zeros(groups.shape[:-1])
    else:  # one launch on an accelerator; the CPU's norm is the slower one
        peak = groups.abs().amax(dim=-1) if groups.is_cpu else torch.linalg.vector_norm(groups, torch.inf, dim=-1)
    if scheme.fmt is QuantFormat.MXFP4:
        stored = _e8m0_scale(peak)
        return Scales(stored, stored.to(torch.float32))
    if scheme.fmt is QuantFormat.NVFP4:
        block, tensor_scale = _e4m3_scale(peak)
        step = block.to(torch.float32) * tensor_scale
        # A block scale that underflowed to zero stands for zeros, so its codes are zeros too.
        return Scales(block, torch.where(step == 0, torch.inf, step), None, tensor_scale)
    largest: float | Tensor = LARGEST[scheme.fmt]
    if not peak.is_cpu:  # by a tensor: CUDA multiplies by the inverse of a Python number, whose scales are not a CPU's
        largest = number(LARGEST[scheme.fmt], peak, peak.dtype)
    scale = _at_least_tiny(peak / largest)
    return Scales(scale, scale)


def group_view(x: Tensor, scales: tuple[int, ...]) -> Tensor:
    """View `x` as [*scales, elements that share a scale]."""
    if not scales:
        return x.reshape(-1)
    groups = scales[-1]
    return x.reshape(*scales, x.shape[-1] // groups if groups else 0)


def _at_least_tiny(step: Tensor) -> Tensor:
    return F.threshold(step, 0.0, 1.0).clamp_(min=_TINY).to(torch.float32)  # a NaN is not below either


def _affine(groups: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Scale and zero point that put the range of each group, zero included, on all codes from -largest - 1."""
    empty = groups.shape[-1] == 0
    low = groups.new_zeros(groups.shape[:-1]) if empty else groups.amin(dim=-1).clamp(max=0.0)
    high = torch.zeros_like(low) if empty else groups.amax(dim=-1).clamp(min=0.0)
    count = 2.0 * largest + 1.0
    scale = _at_least_tiny(high / count - low / count)  # the difference itself may overflow
    zero = (-largest - 1.0 - low / scale).round().clamp(-largest - 1.0, largest)
    return scale, torch.nan_to_num(zero, nan=0.0).to(torch.int32)


def _e8m0_scale(peak: Tensor) -> Tensor:
    """The power of two that puts the peak's exponent at E2M1's largest (OCP MX)."""
    exponent = torch.where(peak == 0, 0, torch.frexp(peak).exponent - 1 - E2M1_MAX_EXPONENT)
    stored = (exponent + _E8M0_BIAS).clamp(0, 2 * _E8M0_BIAS)
    return torch.where(peak.isfinite(), stored, _E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def _e4m3_scale(peak: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4's two levels: E4M3 per block, float32 per tensor. A step is their product.

    The tensor scale follows the largest finite block; a poisoned block has a NaN for its scale.
    """
    finite = torch.where(peak.isfinite(), peak, 0.0)
    largest = finite.amax() if peak.numel() else peak.new_zeros(())
    tensor_scale = _at_least_tiny(largest / (E2M1_VALUES[-1] * LARGEST[QuantFormat.FP8_E4M3]))
    block = (finite / E2M1_VALUES[-1] / tensor_scale).clamp(max=LARGEST[QuantFormat.FP8_E4M3])
    stored = to_odd(torch.where(peak.isfinite(), block, torch.nan)).to(torch.float8_e4m3fn)
    return stored, tensor_scale


def _encode(x: Tensor, fmt: QuantFormat, zero_point: Tensor | None) -> Tensor:
    """Codes of numbers already divided by their step."""
    if fmt in (QuantFormat.FP8_E4M3, QuantFormat.FP8_E5M2):
        largest = LARGEST[fmt]
        dtype = torch.float8_e4m3fn if fmt is QuantFormat.FP8_E4M3 else torch.float8_e5m2
        return to_odd(x.clamp(-largest, largest)).to(dtype)
    x = torch.nan_to_num(x, nan=0.0)  # of a poisoned group, whose scale says so; what NaN becomes as int is undefined
    if fmt in (QuantFormat.INT8, QuantFormat.INT4):
        largest = LARGEST[fmt]
        whole = x.round()
        if zero_point is None:
            whole = whole.clamp(-largest, largest)
        else:
            whole = (whole + zero_point.unsqueeze(-1)).clamp(-largest - 1.0, largest)
        codes = whole.to(torch.int8)
        return codes if fmt is QuantFormat.INT8 else codes.view(torch.uint8) & 0xF
    if fmt is QuantFormat.NF4:
        table = _table(NF4_VALUES, x, torch.float64)  # in float32 the midpoints would be rounded
        return torch.bucketize(x.to(torch.float64), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    # E2M1: the nearest code, ties to the even code, saturating at 6.
    table = _table(E2M1_VALUES, x, x.dtype)
    midpoints = (table[1:] + table[:-1]) / 2
    magnitude = x.abs()
    below = torch.bucketize(magnitude, midpoints)
    above = torch.bucketize(magnitude, midpoints, right=True)  # differs from `below` only on a tie
    code = torch.where(below % 2 == 0, below, above)
    return (code | (torch.signbit(x).to(code.dtype) << 3)).to(torch.uint8)


def decode(codes: Tensor, fmt: QuantFormat) -> Tensor:
    """The numbers that codes stand for, in float32."""
    if fmt is QuantFormat.INT4:
        return (codes.to(torch.int32) ^ 8).to(torch.float32) - 8.0  # two's complement of four bits
    if fmt is QuantFormat.NF4:
        return _table(NF4_VALUES, codes, torch.float32)[codes.long()]
    if fmt in (QuantFormat.MXFP4, QuantFormat.NVFP4):
        values = E2M1_VALUES + tuple(-value for value in E2M1_VALUES)
        return _table(values, codes, torch.float32)[codes.long()]
    return codes.to(torch.float32)


def _table(values: tuple[float, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers on the device of `like`, written there: a copy from the host may not stand inside a CUDA graph."""
    return torch.stack([like.new_full((), value, dtype=dtype) for value in values])
