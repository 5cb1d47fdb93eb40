"""SwiGLU and GeGLU on a packed [gate | up] tensor by Liger.

Liger's own GeGLU function writes the gradients over the tensors it saved, which are the caller's where a half is
contiguous, and gives wrong gradients when a graph is run backward twice. So its forward and backward are called from
a function of ours that saves the packed tensor and splits it again.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_swiglu: Any = importlib.import_module("liger_kernel.ops.swiglu")
_geglu: Any = importlib.import_module("liger_kernel.ops.geglu")

_grad_enabled = torch.is_grad_enabled


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half, both read from the packed tensor."""
    if _grad_enabled() and x.requires_grad:
        # In rows: the library gives the gradient as rows, whatever it was given.
        found: Tensor = _swiglu.LigerFusedGateUpSiLUMulFunction.apply(x.reshape(-1, x.shape[-1]), False)
        return found.view(*x.shape[:-1], x.shape[-1] // 2)
    out: Tensor = _swiglu.swiglu_fused_gate_up_forward(x.contiguous())[1]
    return out


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """gelu(first half) * second half, with the tanh form of GELU."""
    if _grad_enabled() and x.requires_grad:
        found: Tensor = _Geglu.apply(x)  # type: ignore[no-untyped-call]
        return found
    gate, up = x.chunk(2, dim=-1)
    out: Tensor = _geglu.geglu_forward(gate.contiguous(), up.contiguous())[2]
    return out


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        out: Tensor = _geglu.geglu_forward(gate.contiguous(), up.contiguous())[2]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Copies: the kernel writes the gradients over what it reads.
        gate, up = (half.clone(memory_format=torch.contiguous_format) for half in x.chunk(2, dim=-1))
        return torch.cat(_geglu.geglu_backward(gate, up, grads[0].contiguous()), dim=-1)
