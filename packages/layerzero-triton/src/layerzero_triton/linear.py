"""`linear` with a weight of INT8, FP8, INT4 or MXFP4 codes; activations as they are or in FP8. Canonical arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor
from layerzero_triton.config import LinearConfig, linear_config, next_power, unit_of
from layerzero_triton.kernels import dequant as device
from layerzero_triton.kernels.launch import Launcher, Plan, assembling, collecting, prepare, remember, sm_count

_product = Launcher(device.product)
_finish = Launcher(device.finish)
_widen = Launcher(device.widen)
_encode = Launcher(device.encode)
_known: set[Any] = set()
Weight = QuantizedTensor | PackedWeight
_FOUR = {QuantFormat.INT4: "int4", QuantFormat.MXFP4: "e2m1"}


_Plans = tuple[Plan, "Plan | None"]  # the product, and where its inner axis is split, what adds the parts
_plans: dict[Any, _Plans] = {}


def coded(weight: Weight) -> tuple[Tensor, Tensor, str, int]:
    """The codes of a weight, its scales as kernels read them, "int4", "e2m1" or "bytes", and how long a block is."""
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    kind, scale = _FOUR.get(source.fmt, "bytes"), source.scale.contiguous()
    codes = source.data if source.data.stride(-1) == 1 else source.data.contiguous()
    return codes, scale.view(torch.uint8) if kind == "e2m1" else scale, kind, source.block_size or 0


def dequantized(
    x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None, config: LinearConfig | None = None
) -> Tensor:
    """x [..., K] times the weight [N, K] that the codes stand for; `config` is for measuring."""
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    n, k = source.shape
    rows = _rows(x.reshape(-1, k))
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    codes, scale, *_ = coded(source)
    zero = None if source.zero_point is None else source.zero_point.contiguous()
    # Everything a plan is made of, and every dtype.
    key = (
        m, rows.stride(0), x.dtype, x.get_device(), n, k, codes.stride(0), codes.dtype, scale.shape, scale.dtype,
        None if zero is None else zero.dtype, None if bias is None else bias.dtype, source.granularity,
        source.block_size, activation, config,
    )  # fmt: skip
    plans = _plans.get(key)
    if plans is None:
        if config is None:
            _prepared(x, source, bias, activation)
        chosen = config or _config(m, source, x.device)
        plans = _planned(rows, codes, scale, source, zero is not None, bias is not None, activation, chosen)
        remember(_plans, key, plans)
    product, finish = plans
    if finish is None:
        _product.go(product, (rows, codes, scale, zero, bias, out))
        return out
    parts = torch.empty((product.grid[1], m, n), dtype=torch.float32, device=x.device)
    _product.go(product, (rows, codes, scale, zero, bias, parts))
    _finish.go(finish, (parts, bias, out))
    return out


def widened(x: Tensor, weight: Weight, bias: Tensor | None, activation: str | None) -> Tensor:
    """For many rows: an MXFP4 weight written out in bfloat16, which holds it exactly, then torch's product."""
    (n, k), (codes, powers, *_) = weight.shape, coded(weight)
    wide = torch.empty((n, k), dtype=torch.bfloat16, device=x.device)
    grid = (-(-n // 8), -(-k // 512), 1)
    _widen(grid, (codes.contiguous(), powers, wide), (n, k // 32), (8, 512, assembling()), 4)
    return _activated(F.linear(x, wide, bias), activation)


def dynamic(x: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows encoded in FP8 in one pass, then `torch._scaled_mm` with scales of channels, or of blocks of 128, inside."""
    source = weight.source
    n, k = source.shape
    rows = _rows(x.reshape(-1, k))
    m, blocks = rows.shape[0], source.scale.shape[-1] if source.granularity == "block" else 1
    codes = torch.empty((m, k), dtype=source.data.dtype, device=x.device)
    scales = torch.empty((blocks, m), dtype=torch.float32, device=x.device)
    if m == 0:
        return x.new_empty((*x.shape[:-1], n))
    wide, unit = next_power(k), unit_of(k, rows.stride(0))
    numbers, constants = (k // unit, rows.stride(0) // unit, m, blocks), (wide, next_power(blocks), unit)
    _encode((m, 1, 1), (rows, codes, scales), numbers, constants, max(4, min(16, wide // 1024)))
    held = source.scale.t() if source.scale.dim() == 2 else source.scale.expand(1, n)
    out = torch._scaled_mm(codes, source.data.t(), scales.t(), held.contiguous(), bias=bias, out_dtype=x.dtype)
    return _activated(out, activation).view(*x.shape[:-1], n)


def _rows(item: Tensor) -> Tensor:
    """The same with the elements of a row next to each other."""
    return item if item.stride(1) == 1 else item.contiguous()


def _activated(out: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return out
    if activation.startswith("gelu"):
        return F.gelu(out.float(), approximate="tanh" if activation == "gelu_tanh" else "none").to(out.dtype)
    return (F.silu if activation == "silu" else F.relu)(out.float()).to(out.dtype)


def _config(m: int, source: QuantizedTensor, device: torch.device) -> LinearConfig:
    """Tiles for so many rows; the short blocks of MXFP4 do not bound a step."""
    block = None if source.fmt is QuantFormat.MXFP4 else source.block_size
    return linear_config(m, *source.shape, block, sm_count(device))


def _planned(
    rows: Tensor, codes: Tensor, scale: Tensor, source: QuantizedTensor, shifted: bool, biased: bool,
    activation: str | None, chosen: LinearConfig,
) -> _Plans:  # fmt: skip
    (n, k), m = source.shape, rows.shape[0]
    four = _FOUR.get(source.fmt, "none")
    blocks = source.granularity == "block" and four != "e2m1"
    s_n = 0 if source.granularity == "tensor" else scale.shape[-1]
    steps = -(-k // chosen.block_k)
    each = -(-steps // chosen.splits)
    splits = -(-steps // each) if steps else 1
    unit = unit_of(rows.stride(0), codes.stride(0), k)
    kind = activation or "none"
    tiles = -(-m // chosen.block_m) * -(-n // chosen.block_n)
    per = (source.block_size or k) // chosen.block_k if blocks else 1
    product = Plan(
        (tiles, splits, 1),
        (m, n, k // unit, rows.stride(0) // unit, codes.stride(0) // unit, s_n, 1 if blocks else 0, each),
        (
            chosen.block_m, chosen.block_n, chosen.block_k, k % chosen.block_k == 0, unit, blocks, per, shifted,
            biased, kind, splits > 1, 8, four, assembling(),
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    finish = Plan((m, -(-n // 512), 1), (m, n, splits), (512, biased, kind)) if splits > 1 else None
    return product, finish


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
            sizes = _config(rows, source, x.device)
            like = torch.empty((rows, source.shape[1]), dtype=x.dtype, device=x.device)
            dequantized(like, source, bias, activation, sizes)
    prepare(launches, x.device)
