"""Adapters over torch's fused functions. Each takes its op's canonical arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference import feed_forward as reference
from layerzero.backends.reference.feed_forward import activate


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`torch.rms_norm` over the last axis (fused on CUDA)."""
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the fused norm."""
    stream = x + residual
    return torch.rms_norm(stream, (stream.shape[-1],), weight, eps), stream


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.layer_norm` over the last axis."""
    return torch.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GELU of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def relu_and_mul(x: Tensor) -> Tensor:
    """ReLU of the first half times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.relu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The BLAS behind `F.linear`, then the activation."""
    out = F.linear(x, weight, bias)
    return out if activation is None else activate(out, activation)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """`F.embedding`; the row of padding_idx gets no gradient."""
    return F.embedding(ids, weight, padding_idx)


# A number farther out than this would round to one that E4M3 does not have.
_E4M3_OVERFLOW = 464.0


def cast(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """`Tensor.to`, always a new tensor; what does not fit is taken care of before."""
    if saturate and dtype != torch.bool:
        x = _clamped(x, dtype)
    elif dtype == torch.float8_e4m3fn:
        x = x.to(torch.float32)
        x = _clamped(x.masked_fill(x.abs() > _E4M3_OVERFLOW, float("nan")), dtype)
    return x.to(dtype, copy=True)


def _clamped(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        # eight and sixteen bits cannot hold every limit they are compared with
        return x.to(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32).clamp(-largest, largest)
    limits = torch.iinfo(dtype)
    return x.to(torch.int64).clamp(limits.min, limits.max)


def narrow_on_cpu(x: Tensor) -> bool:
    """Whether x is of 16 bits and on a CPU, most of which multiply such numbers slower than wide ones."""
    return x.is_cpu and x.dtype.itemsize == 2


def mlp(x: Tensor, *rest: Any) -> Tensor:
    """`F.linear`, activation, `F.linear`.

    On a CPU 16-bit numbers are widened first, so that nothing is rounded between the two products: with it some
    results would leave the bounds. On a GPU what stands between them is rounded to the dtype of x, as everywhere.
    """
    return reference.mlp(x, *rest) if narrow_on_cpu(x) else reference.feed_forward(x, *rest)
