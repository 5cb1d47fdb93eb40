"""Adapters over torch's fused functions. Each takes its op's canonical arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
