"""INT8, INT4 and FP8 codes of a tensor, and back. Canonical arguments of `quantize` and `dequantize`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero.model.quant import QuantizedTensor, QuantScheme
from layerzero_cpu.library import done, native

__all__ = ["dequantize", "quantize"]

_FORMATS = {
    QuantFormat.INT8: (0, torch.int8),
    QuantFormat.INT4: (1, torch.uint8),
    QuantFormat.FP8_E4M3: (2, torch.float8_e4m3fn),
    QuantFormat.FP8_E5M2: (3, torch.float8_e5m2),
}


def quantize(x: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """Scales and codes in one pass over each group."""
    number, dtype = _FORMATS[scheme.fmt]
    shape = tuple(x.shape)
    scales = scheme.scales_for(shape)
    x = x.detach().contiguous()
    packed = number == 1
    codes = torch.empty((*shape[:-1], shape[-1] // 2) if packed else shape, dtype=dtype)
    scale = torch.empty(scales, dtype=torch.float32)
    zero = None if scheme.symmetric else torch.empty(scales, dtype=torch.int32)
    done(native.quantize(x, codes, scale, zero, _each(x.numel(), scale), number))
    return QuantizedTensor(codes, scale, scheme.fmt, scheme.granularity, shape, x.dtype, scheme.block_size, zero)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
    """(code - zero point) * scale in float32, rounded once."""
    number, _ = _FORMATS[qt.fmt]
    if qt.requires_grad and torch.is_grad_enabled():
        return _scaled(qt, dtype or qt.dtype)
    out = torch.empty(qt.shape, dtype=dtype or qt.dtype)
    zero = qt.zero_point
    if zero is not None:
        zero = zero.to(torch.int32).contiguous()
    scale = qt.scale.detach().contiguous()
    done(native.dequantize(qt.data.contiguous(), scale, zero, out, _each(out.numel(), scale), number))
    return out


def _scaled(qt: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The same with the scales' product left to torch, whose gradient is asked for."""
    plain = dequantize(replace(qt, scale=torch.ones_like(qt.scale, requires_grad=False)), torch.float32)
    groups = plain.view(*qt.scale.shape, _each(plain.numel(), qt.scale))
    return (groups * qt.scale.unsqueeze(-1)).view(qt.shape).to(dtype)


def _each(count: int, scale: Tensor) -> int:
    """Numbers that share a scale."""
    groups = math.prod(scale.shape)
    return count // groups if groups else 0
