"""RMSNorm, residual add + RMSNorm, Gemma's two, and LayerNorm, forward and backward. Canonical arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_cpu.library import adapted, again, done, native

__all__ = ["add_rms_norm", "gemma_add_rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm"]

_rms = native.rms_norm
_add_rms = native.add_rms_norm
_layer = native.layer_norm
_empty = torch.empty_like
_grad_enabled = torch.is_grad_enabled


@adapted
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, rounded once."""
    if _grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _RmsNorm.apply(x, weight, eps, 0.0)  # type: ignore[no-any-return, no-untyped-call]
    return _plain_rms(x, weight, 0.0, eps)


@adapted
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight), rounded once."""
    if _grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps, 1.0)  # type: ignore[no-any-return, no-untyped-call]
    return _plain_rms(x, weight, 1.0, eps)


@adapted
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the stream x + residual, the stream in the dtype of `residual`)."""
    return _added(x, residual, weight, eps, 0.0)


@adapted
def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with Gemma's weight."""
    return _added(x, residual, weight, eps, 1.0)


@adapted
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, rounded once."""
    if _grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]
    out = _empty(x)
    if _layer(x, weight, bias, eps, out) is None:
        return out
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    done(_layer(x, _dense(weight), _dense(bias), eps, out))
    return out


def _plain_rms(x: Tensor, weight: Tensor | None, offset: float, eps: float) -> Tensor:
    out = _empty(x)
    if _rms(x, weight, offset, eps, out) is None:
        return out
    out = torch.empty(x.shape, dtype=x.dtype)  # the last axis has gaps
    done(_rms(x.contiguous(), _dense(weight), offset, eps, out))
    return out


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _added(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    wanted = x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    if wanted and _grad_enabled():
        return _AddNorm.apply(x, residual, weight, eps, offset)  # type: ignore[no-any-return, no-untyped-call]
    return _plain_added(x, residual, weight, eps, offset)


def _plain_added(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    if x.dtype is not residual.dtype:  # rare: the sum in the wider type, and the norm from the rounded stream
        stream = (x.float() + residual.float()).to(residual.dtype)
        return _plain_rms(stream.float(), weight, offset, eps).to(x.dtype), stream
    out, stream = _empty(x), _empty(residual)
    if _add_rms(x, residual, weight, offset, eps, out, stream) is None:
        return out, stream
    out, stream = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    done(_add_rms(x.contiguous(), residual.contiguous(), _dense(weight), offset, eps, out, stream))
    return out, stream


def _parts(x: Tensor) -> int:
    """How many runs of rows sum their gradients apart; by the shape alone, so that results do not depend on threads."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return max(1, min(64, rows // 4))


def _of_sums(x: Tensor) -> torch.dtype:
    """What gradients of weight and bias are summed in: terms cancel, so it is wider than what they are rounded to."""
    return torch.float64 if x.dtype is torch.float32 else torch.float32


def _rms_gradients(
    grad: Tensor, also: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, offset: float, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    x, grad = x.contiguous(), grad.contiguous()
    wide = None if weight is None else weight.detach().float().contiguous()
    result = torch.empty(x.shape, dtype=x.dtype)
    sums = torch.zeros((_parts(x), x.shape[-1]), dtype=_of_sums(x)) if of_weight else None
    also = None if also is None else also.contiguous()
    done(native.rms_norm_grad(grad, also, x, wide, offset, eps, result, sums))
    return result, None if sums is None or weight is None else sums.sum(dim=0).to(weight.dtype)


def _rms_formula(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """What the kernel computes, in operations that torch can derive as often as it likes."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (out if weight is None else out * (weight.float() + offset)).to(x.dtype)


def _layer_formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = (None if t is None else t.float() for t in (weight, bias))
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], *wide, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return _plain_rms(x, weight, offset, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if _grad_enabled():
            return *again(lambda x, w: _rms_formula(x, w, ctx.eps, ctx.offset), (x, weight), grad), None, None
        to_x, to_weight = _rms_gradients(grad, None, x, weight, ctx.eps, ctx.offset, ctx.needs_input_grad[1])
        return to_x, to_weight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        out, stream = _plain_added(x, residual, weight, eps, offset)
        ctx.save_for_backward(stream, weight)
        ctx.eps, ctx.offset, ctx.kinds = eps, offset, (x.dtype, residual.dtype)
        return out, stream

    @staticmethod
    def backward(ctx: Any, grad: Tensor, stream_grad: Tensor) -> tuple[Tensor | None, ...]:
        stream, weight = ctx.saved_tensors
        of_x, of_residual = ctx.kinds
        if (
            _grad_enabled()
        ):  # written out: the stream is a result of this very node, which a derivation would meet again
            wide, given = stream.float(), grad.float()
            root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
            normal = wide * root
            scaled = given if weight is None else given * (weight.float() + ctx.offset)
            of_stream = root * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
            to_weight = None if weight is None else (given * normal).flatten(0, -2).sum(0).to(weight.dtype)
            both = of_stream + stream_grad
            return both.to(of_x), both.to(of_residual), to_weight, None, None
        if of_x is not of_residual:
            stream, grad, stream_grad = stream.float(), grad.float(), stream_grad.float()
        both, to_weight = _rms_gradients(
            grad, stream_grad, stream, weight, ctx.eps, ctx.offset, ctx.needs_input_grad[2]
        )
        return both.to(of_x), both.to(of_residual), to_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return layer_norm(x.detach(), *(None if t is None else t.detach() for t in (weight, bias)), eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if _grad_enabled():
            return *again(lambda x, w, b: _layer_formula(x, w, b, ctx.eps), (x, weight, bias), grad), None
        x = x.contiguous()
        wide = None if weight is None else weight.detach().float().contiguous()
        result = torch.empty(x.shape, dtype=x.dtype)
        sums = torch.empty((2, _parts(x), x.shape[-1]), dtype=_of_sums(x))
        done(native.layer_norm_grad(grad.contiguous(), x, wide, ctx.eps, result, sums[0], sums[1]))
        to_weight, to_bias = sums.sum(dim=1).unbind()
        return (
            result,
            None if weight is None else to_weight.to(weight.dtype),
            None if bias is None else to_bias.to(bias.dtype),
            None,
        )
