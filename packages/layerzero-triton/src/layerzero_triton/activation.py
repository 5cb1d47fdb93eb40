"""silu, gelu and relu of the first half of the last axis times the second half, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerzero_triton.config import activation_config, next_power, unit_of
from layerzero_triton.kernels import activation as device
from layerzero_triton.kernels.launch import Launcher, Plan, remember
from layerzero_triton.norm import rows_of

_forward = Launcher(device.forward)
_backward = Launcher(device.backward)
_plans: dict[Any, Plan] = {}


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU: gelu(gate) * up, with erf ("none") or its approximation by tanh."""
    return _gated(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def relu_and_mul(x: Tensor) -> Tensor:
    """ReGLU: relu(gate) * up."""
    return _gated(x, "relu")


def _gated(x: Tensor, kind: str) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _Gated.apply(x, kind)  # type: ignore[no-any-return, no-untyped-call]
    return gated(x, kind)


def gated(x: Tensor, kind: str) -> Tensor:
    """One launch."""
    width = x.shape[-1] // 2
    key = (x.shape, x.dtype, x.get_device(), kind) if x.is_contiguous() else None
    out = x.new_empty((*x.shape[:-1], width))
    plan = _plans.get(key)
    if plan is not None:
        _forward.go(plan, (x, out))
        return out
    flat, step = rows_of(x, 2 * width)
    rows = out.numel() // width if width else 0
    if rows == 0:
        return out
    block, warps = activation_config(width)
    unit = unit_of(step, width)
    blocks = -(-width // block)
    numbers = (width // unit, step // unit, blocks)
    plan = Plan((rows * blocks, 1, 1), numbers, (block, width % block == 0, unit, kind), warps)
    if key is not None:
        remember(_plans, key, plan)
    _forward.go(plan, (flat, out))
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return gated(x, kind)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        width = x.shape[-1] // 2
        flat, step = rows_of(x, 2 * width)
        given, grad_step = rows_of(grad, width)
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = grad.numel() // width if width else 0
        if rows:
            block = min(1024, next_power(width))
            unit = unit_of(step, grad_step, width)
            blocks = -(-width // block)
            _backward(
                (rows * blocks, 1, 1),
                (given, flat, result),
                (width // unit, step // unit, grad_step // unit, blocks),
                (block, unit, ctx.kind),
                4,
            )
        return result, None
