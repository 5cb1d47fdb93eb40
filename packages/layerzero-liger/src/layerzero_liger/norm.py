"""RMSNorm, fused add + RMSNorm, both as Gemma has them, and LayerNorm by Liger.

The casting mode is always "gemma": everything in float32 and one rounding at the end, which is what our ops promise;
the mode "llama" rounds the normalised row before the weight. Gradients are never written over the incoming ones.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

# From the submodules: the package in front of them may have replaced its names by other implementations.
_rms: Any = importlib.import_module("liger_kernel.ops.rms_norm")
_add: Any = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
_layer: Any = importlib.import_module("liger_kernel.ops.layer_norm")

_MODE = "gemma"
_grad_enabled = torch.is_grad_enabled


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    return _norm(x, weight, eps, 0.0)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with 1 + weight, which is added up in float32."""
    return _norm(x, weight, eps, 1.0)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual)."""
    return _add_norm(x, residual, weight, eps, 0.0)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with 1 + weight."""
    return _add_norm(x, residual, weight, eps, 1.0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm; the kernel always adds a bias, so a missing one is zeros."""
    if bias is None:
        bias = torch.zeros_like(weight, requires_grad=False)
    if _needs_grad(x, weight, bias):
        found: Tensor = _layer.LigerLayerNormFunction.apply(x, weight, bias, eps)
        return found
    out: Tensor = _layer.layer_norm_forward(x.contiguous(), weight.contiguous(), bias.contiguous(), eps)[0]
    return out


def _norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if _needs_grad(x, weight):
        found: Tensor = _rms.LigerRMSNormFunction.apply(x, weight, eps, offset, _MODE, False, None)
        return found
    if weight is not None:
        weight = weight.contiguous()
    out: Tensor = _rms.rms_norm_forward(x.contiguous(), weight, eps, offset, _MODE, None)[0]
    return out


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if _needs_grad(x, residual, weight):
        out, stream = _add.LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, _MODE, False)
    else:
        out, stream, *_ = _add.fused_add_rms_norm_forward(
            x.contiguous(), residual.contiguous(), weight.contiguous(), eps, offset, _MODE
        )
    return out, stream


def _needs_grad(*tensors: Tensor | None) -> bool:
    return _grad_enabled() and any(item is not None and item.requires_grad for item in tensors)
