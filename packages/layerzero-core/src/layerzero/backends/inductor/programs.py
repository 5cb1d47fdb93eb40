"""The programs that are compiled, as plain PyTorch: each reads its inputs once and rounds once at the end.

Most are the reference's own formulas. Rows are a free size, everything else is fixed when a program is compiled.
`eps` comes in as a tensor of one element, so that one compiled program serves every value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference import mlp, norm
from layerzero.backends.reference.positional import rope_halves

__all__ = ["PROGRAMS"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [outer, S, inner, D], cos and sin [S, D / 2]."""
    return rope_halves(x, None, cos, sin, False, "BSHD", None, False)[0]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "rms_norm": norm.rms_norm,
    "add_rms_norm": norm.add_rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
    **{name: getattr(mlp, name) for name in mlp.__all__},
    "gelu_and_mul": functools.partial(mlp.gelu_and_mul, approximate="none"),
    "gelu_tanh_and_mul": functools.partial(mlp.gelu_and_mul, approximate="tanh"),
}
