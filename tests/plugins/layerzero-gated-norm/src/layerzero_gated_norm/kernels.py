"""Two kernels of `rms_norm_gated`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS: list[str] = []


def fused(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """One pass over float32 copies."""
    CALLS.append("fused")
    wide = x.double() if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    gated = F.silu(gate.to(wide.dtype))
    return (wide * scale * gated if weight is None else wide * scale * weight.to(wide.dtype) * gated).to(x.dtype)


def split(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm, then the gate; takes a weight only."""
    CALLS.append("split")
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps)
    return (normed * F.silu(gate.to(wide.dtype))).to(x.dtype)
