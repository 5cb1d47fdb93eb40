"""Rotary embedding of q and k, in place or not, forward and backward. Canonical arguments of `rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.model.rotary import rotated
from layerzero_cpu.library import adapted, done, native

__all__ = ["rope"]

_rope = native.rope
_empty = torch.empty_like
_grad_enabled = torch.is_grad_enabled


@adapted
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]:
    """Both tensors in one call; the tables' rows are read once for all heads."""
    if _grad_enabled() and (
        q.requires_grad or cos.requires_grad or sin.requires_grad or (k is not None and k.requires_grad)
    ):
        if cos.requires_grad or sin.requires_grad:
            return rotated(q, k, cos, sin, interleaved, layout, position_ids, inplace)
        how = (cos, sin, interleaved, layout, position_ids, inplace, False)
        turned = _Rope.apply(q, *how)  # type: ignore[no-untyped-call]
        return turned, None if k is None else _Rope.apply(k, *how)  # type: ignore[no-untyped-call]
    return _turn(q, k, cos, sin, interleaved, layout, position_ids, inplace, False)


def _turn(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    inplace: bool,
    backward: bool,
) -> tuple[Tensor, Tensor | None]:
    out_q = q if inplace else _empty(q)
    out_k = k if inplace or k is None else _empty(k)
    axis = 2 if layout == "BHSD" else 1
    # What is read through a negated view is resolved for the kernel; what is written through one, torch has to write.
    onto = inplace and (q.is_neg() or (k is not None and k.is_neg()))
    if (
        cos.dtype is not torch.float64
        and not onto
        and (_rope(q, k, cos, sin, position_ids, out_q, out_k, interleaved, axis, backward) is None)
    ):
        if inplace:  # autograd has to learn that saved values were overwritten
            increment_version(q if k is None else (q, k))
        return out_q, out_k
    # a last axis with gaps, tables with different strides, or tables in float64
    new_q = torch.empty(q.shape, dtype=q.dtype)
    new_k = None if k is None else torch.empty(k.shape, dtype=k.dtype)
    cos, sin = (t.to(torch.float32 if t.dtype is torch.float64 else t.dtype).contiguous() for t in (cos, sin))
    dense_k = None if k is None else k.contiguous()
    done(_rope(q.contiguous(), dense_k, cos, sin, position_ids, new_q, new_k, interleaved, axis, backward))
    if not inplace:
        return new_q, new_k
    return q.copy_(new_q), None if k is None or new_k is None else k.copy_(new_k)


class _Rope(torch.autograd.Function):
    """One tensor: q and k apart, so that a result nobody uses gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, layout: str, position_ids: Tensor | None,
        inplace: bool, back: bool,
    ) -> Tensor:  # fmt: skip
        out, _ = _turn(x, None, cos, sin, interleaved, layout, position_ids, inplace, back)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.how, ctx.back = (interleaved, layout), back
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids = ctx.saved_tensors
        if _grad_enabled():  # linear in what is turned: its derivative is the turn back
            how = (cos, sin, *ctx.how, position_ids, False, not ctx.back)
            return _Rope.apply(grad, *how), *(None,) * 7  # type: ignore[no-untyped-call]
        to_x, _ = _turn(grad, None, cos, sin, *ctx.how, position_ids, False, not ctx.back)
        return to_x, *(None,) * 7
