"""Gated activations: the first half of the last axis is the gate, the second half the value it multiplies."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype

__all__ = ["gelu_and_mul", "relu_and_mul", "silu_and_mul"]


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    gate, up = _halves(x)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU: gelu(gate) * up; `approximate` is "none" (erf) or "tanh"."""
    gate, up = _halves(x)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def relu_and_mul(x: Tensor) -> Tensor:
    """ReGLU: relu(gate) * up."""
    gate, up = _halves(x)
    return (F.relu(gate) * up).to(x.dtype)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
    return gate, up
