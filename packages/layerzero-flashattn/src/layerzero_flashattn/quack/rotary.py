"""RoPE by QuACK: one launch for q and one for k, read and written where they lie.

The library has no gradient for the tables, and turns incoming gradients in place after an in-place forward; so its
forward and its inverse are called from a function of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_flashattn.compiler import library
from layerzero_flashattn.quiet import quietly

_library: Any = library("quack.rotary")
_apply = quietly(_library.apply_rotary)

_grad_enabled = torch.is_grad_enabled


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: None,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]:
    """Tables [S, rotary/2] of any dtype; [B, H, S, D] is given to the library as a view of [B, S, H, D]."""
    swap = layout == "BHSD"
    seq_len = q.shape[2 if swap else 1]
    if cos.shape[0] != seq_len:
        cos, sin = cos[:seq_len], sin[:seq_len]
    turned = _turn(q, cos, sin, interleaved, swap, inplace)
    return turned, None if k is None else _turn(k, cos, sin, interleaved, swap, inplace)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, swap: bool, inplace: bool) -> Tensor:
    tokens = x.transpose(1, 2) if swap else x
    recorded = _grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad)
    if recorded:
        out: Tensor = _Rope.apply(tokens, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    else:
        out = _apply(tokens, cos, sin, interleaved=interleaved, inplace=inplace)
        if inplace:
            return x
    if swap:
        out = out.transpose(1, 2)
    return x.copy_(out) if inplace else out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        learned = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(cos, sin, *((x,) if learned else ()))
        ctx.interleaved = interleaved
        out: Tensor = _apply(x, cos, sin, interleaved=interleaved, inplace=False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *inputs = ctx.saved_tensors
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        found = _apply(grad, cos, sin, interleaved=ctx.interleaved, inplace=False, conjugate=True)
        if not inputs:
            return found, None, None, None
        return found, *_table_gradients(inputs[0], grad, cos, ctx.interleaved), None


def _table_gradients(x: Tensor, grad: Tensor, table: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin [S, rotary/2] from a turned tensor [B, S, H, D]."""
    width = 2 * table.shape[-1]
    if interleaved:
        places = (slice(0, width, 2), slice(1, width, 2))
    else:
        places = (slice(0, width // 2), slice(width // 2, width))
    a, b = (x[..., place].float() for place in places)
    grad_a, grad_b = (grad[..., place].float() for place in places)
    cos, sin = (grad_a * a + grad_b * b).sum((0, 2)), (grad_b * a - grad_a * b).sum((0, 2))
    return cos.to(table.dtype), sin.to(table.dtype)
