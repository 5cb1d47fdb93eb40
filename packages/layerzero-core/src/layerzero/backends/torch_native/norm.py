"""Norms on torch's fused ones in the wide precision: Gemma's, and those whose weight has another dtype than x."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`torch.rms_norm` in the wide precision, rounded once, to the dtype of x."""
    return _norm(x, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the norm of the sum in the stream's own dtype."""
    stream = (x + residual).to(residual.dtype)
    return _norm(stream, weight, eps).to(x.dtype), stream


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.layer_norm` in the wide precision, rounded once, to the dtype of x."""
    wide = compute_dtype(x, weight, bias)
    scale, shift = (None if item is None else item.to(wide) for item in (weight, bias))
    return torch.layer_norm(x.to(wide), (x.shape[-1],), scale, shift, eps).to(x.dtype)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.rms_norm` in the wide precision, so that one rounding at the end is the only one."""
    if x.dtype is weight.dtype is torch.float32:  # wide already
        return torch.rms_norm(x, (x.shape[-1],), 1.0 + weight, eps)
    return _norm(x, 1.0 + weight.to(compute_dtype(x, weight)), eps).to(x.dtype)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the norm of the sum in the stream's own dtype."""
    if x.dtype is residual.dtype is weight.dtype is torch.float32:
        stream = x + residual
        return torch.rms_norm(stream, (x.shape[-1],), 1.0 + weight, eps), stream
    # torch adds mixed dtypes in the wider of the two, which here is as wide as the sum has to be.
    stream = (x + residual).to(residual.dtype)
    return _norm(stream, 1.0 + weight.to(compute_dtype(stream, weight)), eps).to(x.dtype), stream


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = compute_dtype(x, weight)
    return torch.rms_norm(x.to(wide), (x.shape[-1],), None if weight is None else weight.to(wide), eps)
