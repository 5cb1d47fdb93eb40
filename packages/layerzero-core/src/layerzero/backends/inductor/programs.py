"""The programs that are compiled, as plain PyTorch: each reads its inputs once and rounds once at the end.

Rows are a free size, everything else is fixed when a program is compiled. `eps` comes in as a tensor of one element,
so that one compiled program serves every value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference import mlp

__all__ = ["PROGRAMS"]


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the rounded sum, and the sum."""
    stream = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm(stream, weight, eps), stream


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [outer, S, inner, D], cos and sin [S, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos.float()[:, None, :], sin.float()[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
    # The gated activations are the reference's own formulas.
    **{name: getattr(mlp, name) for name in mlp.__all__},
    "gelu_and_mul": functools.partial(mlp.gelu_and_mul, approximate="none"),
    "gelu_tanh_and_mul": functools.partial(mlp.gelu_and_mul, approximate="tanh"),
}
