"""SiLU, GELU and ReLU of the first half of the last axis times the second half, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_cpu.library import adapted, again, done, native

__all__ = ["gelu_and_mul", "relu_and_mul", "silu_and_mul"]

_gated = native.gated
_empty = torch.empty
_grad_enabled = torch.is_grad_enabled
_SILU, _GELU, _GELU_TANH, _RELU = range(4)


@adapted
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    return _either(x, _SILU)


@adapted
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU: gelu(gate) * up, with erf ("none") or its approximation by tanh."""
    return _either(x, _GELU_TANH if approximate == "tanh" else _GELU)


@adapted
def relu_and_mul(x: Tensor) -> Tensor:
    """ReGLU: relu(gate) * up."""
    return _either(x, _RELU)


def _either(x: Tensor, kind: int) -> Tensor:
    if x.requires_grad and _grad_enabled():
        return _Gated.apply(x, kind)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, kind)


def _forward(x: Tensor, kind: int) -> Tensor:
    shape = x.shape
    out = _empty((*shape[:-1], shape[-1] // 2), dtype=x.dtype)
    if _gated(x, out, kind) is not None:
        done(_gated(x.contiguous(), out, kind))
    return out


def _formula(x: Tensor, kind: int) -> Tensor:
    """What the kernel computes, in operations that torch can derive as often as it likes."""
    gate, up = x.float().chunk(2, dim=-1)
    if kind in (_GELU, _GELU_TANH):
        out = torch.nn.functional.gelu(gate, approximate="tanh" if kind == _GELU_TANH else "none")
    else:
        out = torch.nn.functional.silu(gate) if kind == _SILU else gate.relu()
    return (out * up).to(x.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return _forward(x, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if _grad_enabled():
            return again(lambda x: _formula(x, ctx.kind), (x,), grad)[0], None
        result = torch.empty(x.shape, dtype=x.dtype)
        done(native.gated_grad(grad.contiguous(), x.contiguous(), result, ctx.kind))
        return result, None
