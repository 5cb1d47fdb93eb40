"""Dtype conversion with one meaning on every device: what torch leaves to the machine is written out here.

Left to the machine are, among others: a float too large for an integer, a float too large for E4M3 (NaN in some builds
of torch, the largest number in others), and the rounding of float64 to sixteen bits, which goes through float32 and so
rounds twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.precision import to_odd

# Beyond the largest finite number by half a step: what is farther away rounds to a number E4M3 does not have.
_E4M3_LARGEST, E4M3_OVERFLOW = 448.0, 464.0

_NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_LONG_INTEGERS = (torch.int32, torch.int64)


def cast(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """`x` in `dtype`; see `lz.cast` for what happens to numbers that do not fit."""
    if dtype == torch.bool:
        return _wide(x) != 0
    if dtype.is_floating_point:
        return _round(x if x.is_floating_point() else _exact(x, dtype), dtype, saturate)
    if x.is_floating_point():
        return _to_integer(x, dtype, saturate)
    if saturate and x.dtype != torch.bool:
        limits = torch.iinfo(dtype)
        x = x.to(torch.int64).clamp(limits.min, limits.max)
    return x.to(dtype, copy=True)


def _round(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """A floating tensor in another floating dtype: to the nearest number, ties to the even one."""
    if dtype in _NARROW:
        x = to_odd(x)
    if saturate:
        largest = torch.finfo(dtype).max
        # Sixteen and eight bits cannot hold every limit they are compared with.
        x = (x.to(torch.float64) if dtype == torch.float64 else _wide(x)).clamp(-largest, largest)
    elif dtype == torch.float8_e4m3fn:
        x = x.to(torch.float32)
        x = x.masked_fill(x.abs() > E4M3_OVERFLOW, float("nan")).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
    return x.to(dtype, copy=True)  # never the input itself: what comes out may be written into


def _wide(x: Tensor) -> Tensor:
    """Floats in float32 or float64, exactly; integers as they are."""
    return x.to(torch.float32) if x.is_floating_point() and x.dtype != torch.float64 else x


def _exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An integer tensor as floats, such that rounding them to `dtype` is the only rounding."""
    if dtype == torch.float64 or dtype == torch.float32:
        return x.to(dtype)
    if x.dtype not in _LONG_INTEGERS:
        return x.to(torch.float32)
    if x.dtype == torch.int64:
        # Beyond 53 bits float64 rounds as well: fold the last 11 bits into one that says whether any was set.
        folded = (x & ~0x7FF) | ((x & 0x7FF) != 0).to(torch.int64) << 11
        x = torch.where((x >= 1 << 53) | (x <= -(1 << 53)), folded, x)
    return x.to(torch.float64)


def _to_integer(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """A floating tensor as integers, cut towards zero. NaN gives 0; what is too large is clamped, or wraps."""
    limits = torch.iinfo(dtype)
    wide = _wide(x).trunc()
    if saturate:
        wide = torch.where(wide.isnan(), 0.0, wide)
        high = wide >= 2.0**63  # int64's largest number is no float
        inside = torch.where(high | (wide < -(2.0**63)), 0.0, wide).to(torch.int64)
        inside = torch.where(high, limits.max, torch.where(wide < -(2.0**63), limits.min, inside))
        return inside.clamp(limits.min, limits.max).to(dtype)
    modulus = 2.0**limits.bits
    wide = torch.where(wide.isfinite(), wide, 0.0).fmod(modulus)  # exact: both are integers
    wide = torch.where(wide >= 2.0**63, wide - 2.0**64, torch.where(wide < -(2.0**63), wide + 2.0**64, wide))
    return wide.to(torch.int64).to(dtype)
