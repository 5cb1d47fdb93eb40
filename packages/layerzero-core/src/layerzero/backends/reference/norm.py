"""RMSNorm, fused residual add + RMSNorm, both as Gemma has them, and LayerNorm, over the last axis.

Activations, residual and weight may differ in dtype; the result has the dtype of `x`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale each row to unit root mean square: x / sqrt(mean(x^2) + eps) * weight."""
    return _rms(x, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, then normalise the stream.

    The new residual keeps the dtype of `residual`, and the norm is taken of that rounded sum: the pair equals the
    two separate ops.
    """
    dtype = compute_dtype(x, residual)
    stream = (x.to(dtype) + residual.to(dtype)).to(residual.dtype)
    return _rms(stream, weight, eps).to(x.dtype), stream


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with the weight stored as its distance from one: x / sqrt(mean(x^2) + eps) * (1 + weight).

    1 + weight is taken in the wide precision and the product rounded once, at the end: in bfloat16 a weight below
    2^-8 would be lost in a sum of the stored precision.
    """
    return rms_norm(x, _one_plus(weight, x), eps)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, then `gemma_rms_norm` of the stream as it was rounded to its own dtype."""
    return add_rms_norm(x, residual, _one_plus(weight, residual), eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Centre and scale each row: (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance."""
    dtype = compute_dtype(x, weight, bias)
    wide = x.to(dtype)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    centred = centred - centred.mean(dim=-1, keepdim=True)  # takes out the rounding error of the first mean
    out = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(x.dtype)


def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    dtype = compute_dtype(x, weight)
    wide = x.to(dtype)
    out = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return out if weight is None else out * weight.to(dtype)


def _one_plus(weight: Tensor, x: Tensor) -> Tensor:
    return 1.0 + weight.to(compute_dtype(x, weight))
