"""`linear` with activations encoded like the weight, FP8 or INT8 (`act="dynamic"`). Canonical arguments of `linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor
from layerzero_triton.config import ScaledConfig, next_power, scaled_config, unit_of
from layerzero_triton.kernels import scaled as device
from layerzero_triton.kernels.launch import Launcher

_encode, _product = Launcher(device.encode), Launcher(device.product)
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def encoded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows [M, K] and their scales [M, 1], as `lz.quantize` with a scale a channel gives them."""
    m, k = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    codes = torch.empty((m, k), dtype=dtype, device=rows.device)
    scales = torch.empty((m, 1), dtype=torch.float32, device=rows.device)
    block = next_power(k)
    warps = 4 if block <= 4096 else 8 if block <= 8192 else 16
    whole = dtype is torch.int8
    _encode((m, 1, 1), (rows, codes, scales), (k, rows.stride(0), _LARGEST[dtype]), (block, whole), warps)
    return codes, scales


def dynamic(
    x: Tensor,
    weight: QuantizedTensor | PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    config: ScaledConfig | None = None,
) -> Tensor:
    """Codes times codes by our own product; `config` is for measuring."""
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    n, k = source.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    codes, scales = encoded(rows, source.data.dtype)
    held = source.data if source.data.stride(1) == 1 else source.data.contiguous()
    scale = source.scale.contiguous()
    blocks = source.granularity == "block"
    chosen = config or scaled_config(m, source.block_size)
    unit = unit_of(held.stride(0), k)
    _product(
        (-(-m // chosen.block_m) * -(-n // chosen.block_n), 1, 1),
        (codes, held, scales, scale, bias, out),
        (m, n, k // unit, held.stride(0) // unit, 0 if scale.dim() == 0 else scale.shape[-1], 1 if blocks else 0),
        (
            chosen.block_m, chosen.block_n, chosen.block_k, k % chosen.block_k == 0, unit,
            (source.block_size or 0) // chosen.block_k if blocks else 0, bias is not None, activation or "none",
            codes.dtype is torch.int8, 8,
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    return out


def rowwise(x: Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """FP8 codes of rows by our kernel, then `torch._scaled_mm` with the scales of rows and channels inside."""
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    codes, scales = encoded(x.reshape(-1, x.shape[-1]), source.data.dtype)
    channel = source.scale.reshape(1, -1).expand(1, source.shape[0]).contiguous()
    out = torch._scaled_mm(codes, source.data.t(), scales, channel, bias=bias, out_dtype=torch.bfloat16)
    return out.reshape(*x.shape[:-1], out.shape[-1])
