"""torch's products with quantized weights. Each takes the canonical arguments of `linear`.

None of torch's functions checks its sizes well (int8 rows whose length is no multiple of 8 are read beyond their end),
so the limits in capabilities.json are part of their correctness.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.feed_forward import activate
from layerzero.backends.torch_native.quantize import dequantize, quantize
from layerzero.model.enums import QuantFormat
from layerzero.model.packed import PackedWeight, activation_scheme
from layerzero.model.quant import QuantizedTensor

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
    out = torch._scaled_mm(codes, source.data.t(), row_scale, channel, out_dtype=torch.bfloat16)
    return _finished(out, bias, activation, x)


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
