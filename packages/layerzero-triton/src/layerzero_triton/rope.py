"""Rotary embedding of q and k, in place or not, forward and backward. Canonical arguments of `rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerzero.model.rotary import rotated
from layerzero_triton.config import next_power, rope_config, unit_of
from layerzero_triton.kernels import rope as device
from layerzero_triton.kernels.launch import Launcher, Plan, remember

_rotate = Launcher(device.rotate)
_plans: dict[Any, Plan] = {}


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
    """One launch for both tensors. A position outside the tables gives NaN, since asking would wait for the device."""
    if torch.is_grad_enabled():
        if cos.requires_grad or sin.requires_grad:
            return rotated(q, k, cos, sin, interleaved, layout, position_ids, inplace)
        if q.requires_grad or (k is not None and k.requires_grad):
            out = _Rope.apply(q, k, cos, sin, interleaved, layout, position_ids, inplace)  # type: ignore[no-untyped-call]
            return out if k is not None else (out, None)
    return rotate(q, k, cos, sin, interleaved, layout, position_ids, inplace, False)


def rotate(
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
    """Launch the kernel; `backward` turns the other way."""
    if q.stride(3) != 1 or (k is not None and k.stride(3) != 1):
        made = rotate(
            q.contiguous(), None if k is None else k.contiguous(), cos, sin, interleaved, layout, position_ids, False,
            backward,
        )  # fmt: skip
        if not inplace:
            return made
        return q.copy_(made[0]), None if k is None else k.copy_(made[1])
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    out_q = q if inplace else torch.empty_like(q)
    out_k = k if inplace or k is None else torch.empty_like(k)
    # Everything a plan is made of, and every dtype.
    key = (
        q.shape, q.stride(), q.dtype, q.get_device(), None if k is None else (k.shape, k.stride(), k.dtype), cos.shape,
        cos.stride(), cos.dtype, sin.dtype,
        None if position_ids is None else (position_ids.shape, position_ids.stride(), position_ids.dtype),
        interleaved, layout, inplace, backward,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _planned(q, k, out_q, out_k, cos, position_ids, interleaved, layout, inplace, backward)
        if plan is None:
            return out_q, out_k
        remember(_plans, key, plan)
    _rotate.go(plan, (q, k, cos, sin, position_ids, out_q, out_k))
    return out_q, out_k


def _planned(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None, cos: Tensor, position_ids: Tensor | None,
    interleaved: bool, layout: str, inplace: bool, backward: bool,
) -> Plan | None:  # fmt: skip
    """The launch; None where there is nothing to turn."""
    head_axis, seq_axis = (1, 2) if layout == "BHSD" else (2, 1)
    batch, heads, seq, dim = q.shape[0], q.shape[head_axis], q.shape[seq_axis], q.shape[3]
    heads_k = 0 if k is None else k.shape[head_axis]
    if batch * seq * (heads + heads_k) * dim == 0:
        return None
    full = cos.ndim == 3
    rotary = cos.shape[-1] if full else 2 * cos.shape[-1]
    t_batch = cos.stride(0) if full and cos.shape[0] > 1 else 0
    p_batch = p_step = 0
    if position_ids is not None:
        p_step = position_ids.stride(-1)
        p_batch = position_ids.stride(0) if position_ids.ndim == 2 and position_ids.shape[0] > 1 else 0
    sq, oq = q.stride(), out_q.stride()
    sk, ok = (sq, oq) if k is None or out_k is None else (k.stride(), out_k.stride())
    steps = (
        sq[0], sq[head_axis], sq[seq_axis], sk[0], sk[head_axis], sk[seq_axis],
        oq[0], oq[head_axis], oq[seq_axis], ok[0], ok[head_axis], ok[seq_axis], t_batch, cos.stride(-2),
    )  # fmt: skip
    unit = unit_of(*steps)
    tokens, together, warps = rope_config(dim, layout, batch * seq, full)
    block = next_power(rotary // 2)
    copied = not inplace and rotary < dim
    chunks = -(-heads // together) + -(-heads_k // together)
    return Plan(
        (-(-seq // tokens) * chunks, batch, 1),
        (seq, heads, heads_k, cos.shape[-2], *(step // unit for step in steps), p_batch, p_step),
        (
            dim, rotary, block, next_power(max(1, dim - rotary)) if copied else 1, tokens, together,
            bool(interleaved), full, position_ids is not None, k is not None, copied, unit, backward,
            seq_axis == 1,
        ),
        warps,
    )  # fmt: skip


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str,
        position_ids: Tensor | None, inplace: bool,
    ) -> Any:  # fmt: skip
        out_q, out_k = rotate(q, k, cos, sin, interleaved, layout, position_ids, inplace, False)
        if inplace:
            ctx.mark_dirty(*(t for t in (q, k) if t is not None))
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.how = (interleaved, layout, k is not None)
        return out_q if k is None else (out_q, out_k)

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids = ctx.saved_tensors
        interleaved, layout, with_k = ctx.how
        given = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        to_q, to_k = rotate(
            given[0], given[1] if with_k else None, cos, sin, interleaved, layout, position_ids, False, True
        )
        return to_q, to_k, None, None, None, None, None, None
