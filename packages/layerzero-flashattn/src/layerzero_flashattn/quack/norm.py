"""RMSNorm, fused add + RMSNorm, both as Gemma has them, and LayerNorm by QuACK.

Without a gradient the forward functions are called directly: the autograd function in front of them costs more than
a small norm takes. All compute in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_flashattn.compiler import library
from layerzero_flashattn.quiet import hush_backward, quietly

_library: Any = library("quack.rmsnorm")
_forward = quietly(_library.rmsnorm_fwd)
_rmsnorm = quietly(_library.rmsnorm)
_layernorm_forward = quietly(_library.layernorm_fwd)
_layernorm_backward = quietly(_library.layernorm_bwd)

_grad_enabled = torch.is_grad_enabled


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    return _norm(x, weight, eps, 0.0)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with 1 + weight, which is added up in float32."""
    return _norm(x, weight, eps, 1.0)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual) in one pass over memory."""
    return _add_norm(x, residual, weight, eps, 0.0)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with 1 + weight."""
    return _add_norm(x, residual, weight, eps, 1.0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm; the library takes weight and bias in float32 only, so others are widened first."""
    rows = _rows(x)
    wide = weight.to(torch.float32)
    wide_bias = None if bias is None else bias.to(torch.float32)
    if _needs_grad(x, weight, bias):
        out: Tensor = _LayerNorm.apply(rows, wide, wide_bias, eps)  # type: ignore[no-untyped-call]
    else:
        out = _layernorm_forward(rows, wide, bias=wide_bias, eps=eps)
    return out.view(x.shape)


class _LayerNorm(torch.autograd.Function):
    """The library has both directions of LayerNorm, but no autograd function around them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out, rstd, mean = _layernorm_forward(x, weight, bias=bias, eps=eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        ctx.has_bias = bias is not None
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd, mean = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _layernorm_backward(
            x, weight, grads[0].contiguous(), rstd, mean, has_bias=ctx.has_bias
        )
        return grad_x, grad_weight, grad_bias, None


def _norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if _needs_grad(x, weight, None):
        found: Tensor = _rmsnorm(x, weight, eps=eps, weight_offset=offset)
        hush_backward(found)
        return found
    if x.ndim == 2:
        out: Tensor = _forward(x, weight, eps=eps, weight_offset=offset)[0]
        return out
    flat: Tensor = _forward(_rows(x), weight, eps=eps, weight_offset=offset)[0]
    return flat.view(x.shape)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if _needs_grad(x, weight, residual):
        out, stream = _rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)
        hush_backward(out, stream)
        return out, stream
    flat, flat_stream, _ = _forward(_rows(x), weight, residual=_rows(residual), eps=eps, weight_offset=offset)
    return flat.view(x.shape), flat_stream.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _needs_grad(x: Tensor, weight: Tensor | None, third: Tensor | None) -> bool:
    return _grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (third is not None and third.requires_grad)
    )
