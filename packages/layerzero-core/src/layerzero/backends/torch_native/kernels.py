"""Adapters over torch's fused functions. Each takes its op's canonical arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference import feed_forward as reference
from layerzero.backends.reference.conversion import E4M3_OVERFLOW
from layerzero.backends.reference.feed_forward import activate
from layerzero.backends.reference.precision import compute_dtype


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


# -- in the wide precision: Gemma's norms, and those whose weight has another dtype than x ----------------------------
def wide_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`torch.rms_norm` in the wide precision, rounded once, to the dtype of x."""
    return _norm(x, weight, eps).to(x.dtype)


def wide_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the norm of the sum in the stream's own dtype."""
    stream = (x + residual).to(residual.dtype)
    return _norm(stream, weight, eps).to(x.dtype), stream


def wide_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.layer_norm` in the wide precision, rounded once, to the dtype of x."""
    wide = compute_dtype(x, weight, bias)
    scale, shift = (None if item is None else item.to(wide) for item in (weight, bias))
    return torch.layer_norm(x.to(wide), (x.shape[-1],), scale, shift, eps).to(x.dtype)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.rms_norm` in the wide precision, so that one rounding at the end is the only one."""
    if x.dtype is weight.dtype is torch.float32:  # wide already
        return torch.rms_norm(x, (x.shape[-1],), 1.0 + weight, eps)
    return wide_rms_norm(x, 1.0 + weight.to(compute_dtype(x, weight)), eps)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add, then the norm of the sum in the stream's own dtype."""
    if x.dtype is residual.dtype is weight.dtype is torch.float32:
        return add_rms_norm(x, residual, 1.0 + weight, eps)
    # torch adds mixed dtypes in the wider of the two, which here is as wide as the sum has to be.
    return wide_add_rms_norm(x, residual, 1.0 + weight.to(compute_dtype(residual, weight)), eps)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = compute_dtype(x, weight)
    return torch.rms_norm(x.to(wide), (x.shape[-1],), None if weight is None else weight.to(wide), eps)


# -- activations and products ------------------------------------------------------------------------------------
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


def cast(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """`Tensor.to`, always a new tensor; what does not fit is taken care of before."""
    if saturate and dtype != torch.bool:
        x = _clamped(x, dtype)
    elif dtype == torch.float8_e4m3fn:
        x = x.to(torch.float32)
        x = _clamped(x.masked_fill(x.abs() > E4M3_OVERFLOW, float("nan")), dtype)
    return x.to(dtype, copy=True)


def _clamped(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        # eight and sixteen bits cannot hold every limit they are compared with
        return x.to(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32).clamp(-largest, largest)
    limits = torch.iinfo(dtype)
    return x.to(torch.int64).clamp(limits.min, limits.max)


def narrow_on_cpu(x: Tensor) -> bool:
    """Whether x is of 16 bits and on a CPU, most of which multiply such numbers slower than wide ones."""
    return x.is_cpu and x.dtype.itemsize == 2


def mlp(x: Tensor, *rest: Any) -> Tensor:
    """`F.linear`, activation, `F.linear`.

    On a CPU 16-bit numbers are widened first, so that nothing is rounded between the two products: with it some
    results would leave the bounds. On a GPU what stands between them is rounded to the dtype of x, as everywhere.
    """
    return reference.mlp(x, *rest) if narrow_on_cpu(x) else reference.feed_forward(x, *rest)


_WIDE = (torch.float32, torch.float64)
_MEAN, _SUM = 1, 2  # torch's numbers for these reductions
_cross_entropy: Any = torch._C._nn.cross_entropy_loss  # what `F.cross_entropy` calls


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float | None,
    softcap: float | None,
    z_loss: float | None,
    reduction: str,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.cross_entropy` in float32; the mean is taken here, so that no row to count gives 0 and not NaN."""
    wide = logits if logits.dtype in _WIDE else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if reduction == "mean" and label_smoothing is None and z_loss is None and not return_lse:
        if labels.ndim != 1:
            wide, labels = wide.reshape(-1, wide.shape[-1]), labels.reshape(-1)
        return _mean(wide, labels if labels.dtype is torch.int64 else labels.to(torch.int64), ignore_index)
    loss = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        labels.reshape(-1).to(torch.int64),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing or 0.0,
    ).reshape(labels.shape)
    lse = torch.logsumexp(wide, dim=-1) if return_lse or z_loss is not None else None
    counted = labels != ignore_index if z_loss is not None or reduction == "mean" else None
    if z_loss is not None and lse is not None and counted is not None:
        loss = loss + torch.where(counted, z_loss * lse.square(), 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean" and counted is not None:
        loss = loss / counted.sum().clamp(min=1)
    return (loss, lse) if return_lse and lse is not None else loss


def _mean(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The mean loss over the rows that count, 0 where none does.

    torch divides by the number of those rows and gives NaN for none. On a CPU looking at the result is cheap; elsewhere
    the host would wait for the device, so the sum is divided here, by the number that torch counts anyway.
    """
    hidden = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if logits.is_cpu and type(logits) is Tensor and not hidden:
        loss = _cross_entropy(logits, labels, None, _MEAN, ignore_index, 0.0)
        if not math.isnan(loss.item()) or bool((labels != ignore_index).any()):
            return loss  # type: ignore[no-any-return]
    total, count = torch.ops.aten.nll_loss_forward.default(
        torch.log_softmax(logits, dim=-1), labels, None, _SUM, ignore_index
    )
    if total.requires_grad or type(total) is not Tensor:
        return total / count.clamp(min=1.0)  # type: ignore[no-any-return]
    return total.div_(count.clamp_(min=1.0))
