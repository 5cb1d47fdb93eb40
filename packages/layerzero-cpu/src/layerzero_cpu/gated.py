"""SiLU, GELU and ReLU of the first half of the last axis times the second half, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerzero_cpu.library import adapted, done, native

__all__ = ["gelu_and_mul", "relu_and_mul", "silu_and_mul"]

_gated = native.gated
_empty = torch.empty
_grad_enabled = torch.is_grad_enabled
_SILU, _GELU, _GELU_TANH, _RELU = range(4)


@adapted
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    if x.requires_grad and _grad_enabled():
        return _Gated.apply(x, _SILU)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, _SILU)


@adapted
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU: gelu(gate) * up, with erf ("none") or its approximation by tanh."""
    kind = _GELU_TANH if approximate == "tanh" else _GELU
    if x.requires_grad and _grad_enabled():
        return _Gated.apply(x, kind)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, kind)


@adapted
def relu_and_mul(x: Tensor) -> Tensor:
    """ReGLU: relu(gate) * up."""
    if x.requires_grad and _grad_enabled():
        return _Gated.apply(x, _RELU)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, _RELU)


def _forward(x: Tensor, kind: int) -> Tensor:
    shape = x.shape
    out = _empty((*shape[:-1], shape[-1] // 2), dtype=x.dtype)
    if _gated(x, out, kind) is not None:
        done(_gated(x.contiguous(), out, kind))
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _forward(x, kind)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        result = torch.empty(x.shape, dtype=x.dtype)
        done(native.gated_grad(grad.contiguous(), x.contiguous(), result, ctx.kind))
        return result, None
