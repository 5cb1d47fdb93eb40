"""`linear` with an INT8 or FP8 weight, activations as they are. Canonical arguments of `linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor
from layerzero_triton.config import LinearConfig, linear_config, unit_of
from layerzero_triton.kernels import dequant as device
from layerzero_triton.kernels.launch import Launcher, collecting, prepare, sm_count

__all__ = ["dequantized"]

_product = Launcher(device.product)
_finish = Launcher(device.finish)
_known: set[Any] = set()


def dequantized(
    x: Tensor,
    weight: QuantizedTensor | PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [..., K] times the weight [N, K] that the codes stand for; `config` is for measuring."""
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    n, k = source.shape
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    codes = source.data if source.data.stride(1) == 1 else source.data.contiguous()
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    if config is None:
        _prepared(x, source, bias, activation)
    chosen = config or linear_config(m, n, k, source.block_size, sm_count(x.device))
    blocks = source.granularity == "block"
    scale, zero = source.scale, source.zero_point
    if scale.dim() and not scale.is_contiguous():
        scale = scale.contiguous()
    zero = None if zero is None else zero.contiguous()
    s_n = 0 if source.granularity == "tensor" else scale.shape[-1]
    steps = -(-k // chosen.block_k)
    each = -(-steps // chosen.splits)
    splits = -(-steps // each) if steps else 1
    unit = unit_of(rows.stride(0), codes.stride(0), k)
    kind = {None: "none", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "silu": "silu", "relu": "relu"}[activation]
    parts = out if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    tiles = -(-m // chosen.block_m) * -(-n // chosen.block_n)
    per = (source.block_size or k) // chosen.block_k if blocks else 1
    _product(
        (tiles, splits, 1),
        (rows, codes, scale, zero, bias, parts),
        (m, n, k // unit, rows.stride(0) // unit, codes.stride(0) // unit, s_n, 1 if blocks else 0, each),
        (
            chosen.block_m, chosen.block_n, chosen.block_k, k % chosen.block_k == 0, unit, blocks, per,
            zero is not None, bias is not None, kind, splits > 1, 8,
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    if splits > 1:
        _finish((m, -(-n // 512), 1), (parts, bias, out), (m, n, splits), (512, bias is not None, kind), 4)
    return out


def _prepared(x: Tensor, source: QuantizedTensor, bias: Tensor | None, activation: str | None) -> None:
    """Compile the tiles that other numbers of rows need, once for a weight's shape."""
    key = (
        x.dtype, x.get_device(), source.shape, source.fmt, source.granularity, source.block_size,
        source.zero_point is None, None if bias is None else bias.dtype, activation,
    )  # fmt: skip
    if key in _known or x.is_cpu:
        return
    _known.add(key)
    with collecting() as launches:
        for rows in (1, 32, 64, 128, 4096):
            sizes = linear_config(rows, *source.shape, source.block_size, sm_count(x.device))
            like = torch.empty((rows, source.shape[1]), dtype=x.dtype, device=x.device)
            dequantized(like, source, bias, activation, sizes)
    prepare(launches, x.device)
