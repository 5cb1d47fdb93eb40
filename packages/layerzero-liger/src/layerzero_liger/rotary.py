"""RoPE by Liger, rotate-half pairs.

Its kernel turns q and k where they lie and, as the library calls it, the incoming gradients too. So it gets copies,
except where the caller asked for in-place. Tables are widened to float32, the dtype the kernel then computes in; the
library has no gradient for them, so it is worked out here where a table asks for one.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_library: Any = importlib.import_module("liger_kernel.ops.rope")
_grad_enabled = torch.is_grad_enabled


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Tables [S, rotary/2]; q and k of either layout."""
    swap = layout == "BHSD"
    cos, sin = cos.to(torch.float32), sin.to(torch.float32)
    tokens_q, tokens_k = (item.transpose(1, 2) if swap else item for item in (q, k))
    if _grad_enabled() and any(item.requires_grad for item in (q, k, cos, sin)):
        out_q, out_k = _Rope.apply(tokens_q, tokens_k, cos, sin)  # type: ignore[no-untyped-call]
    elif inplace and tokens_q.is_contiguous() and tokens_k.is_contiguous():
        _turn(tokens_q, tokens_k, cos, sin, backward=False)
        return q, k
    else:
        out_q, out_k = _turn(_copy(tokens_q), _copy(tokens_k), cos, sin, backward=False)
    if swap:
        out_q, out_k = out_q.transpose(1, 2), out_k.transpose(1, 2)
    return (q.copy_(out_q), k.copy_(out_k)) if inplace else (out_q, out_k)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        learned = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(cos, sin, *((q, k) if learned else ()))
        return _turn(_copy(q), _copy(k), cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *inputs = ctx.saved_tensors
        found = _turn(_copy(grads[0]), _copy(grads[1]), cos, sin, backward=True)
        if not inputs:
            return *found, None, None
        one, two = (_table_gradients(x, grad, cos) for x, grad in zip(inputs, grads, strict=True))
        return *found, one[0] + two[0], one[1] + two[1]


def _table_gradients(x: Tensor, grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin from one turned tensor [B, S, H, D]."""
    half = table.shape[-1]
    a, b = (x[..., first : first + half].float() for first in (0, half))
    grad_a, grad_b = (grad[..., first : first + half].float() for first in (0, half))
    parts = ((grad_a * a + grad_b * b).sum((0, 2)), (grad_b * a - grad_a * b).sum((0, 2)))
    missing = table.shape[0] - x.shape[1]  # rows of the table beyond the tokens
    cos, sin = (torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in parts)
    return cos, sin


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """Turn contiguous [B, S, H, D] tensors where they lie. The library takes their transposes and undoes that."""
    turn = _library.rope_backward if backward else _library.rope_forward
    turn(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=2 * cos.shape[-1])
    return q, k


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
