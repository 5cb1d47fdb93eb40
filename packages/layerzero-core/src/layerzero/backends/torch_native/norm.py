"""Gemma's norms on torch's fused RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gemma_add_rms_norm", "gemma_rms_norm"]


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.rms_norm` in the wide precision, so that one rounding at the end is the only one."""
    return _norm(x, weight, eps).to(x.dtype)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the norm of the sum in the stream's own dtype."""
    # torch adds mixed dtypes in the wider of the two, which here is as wide as the sum has to be.
    stream = (x + residual).to(residual.dtype)
    return _norm(stream, weight, eps).to(x.dtype), stream


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    return torch.rms_norm(x.to(wide), (x.shape[-1],), 1.0 + weight.to(wide), eps)
