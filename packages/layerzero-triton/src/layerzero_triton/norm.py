"""RMSNorm, residual add + RMSNorm, and Gemma's two, forward and backward. Canonical arguments of their ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerzero_triton.config import NormConfig, next_power, norm_config, unit_of
from layerzero_triton.kernels import norm as device
from layerzero_triton.kernels.launch import Launcher, Plan, remember, sm_count

_forward = Launcher(device.forward)
_backward = Launcher(device.backward)
_grad_enabled = torch.is_grad_enabled
_plans: dict[Any, Plan] = {}


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, rounded once."""
    if _grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _Norm.apply(x, None, weight, eps, False)[0]  # type: ignore[no-any-return, no-untyped-call]
    return norm(x, None, weight, eps, False)[0]


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight), rounded once."""
    if _grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Norm.apply(x, None, weight, eps, True)[0]  # type: ignore[no-any-return, no-untyped-call]
    return norm(x, None, weight, eps, True)[0]


def fixed_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms_norm` without gradients, the bits of a row the same for any number of rows."""
    return norm(x, None, weight, eps, False, fixed=True)[0]


def fixed_gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with Gemma's weight."""
    return norm(x, None, weight, eps, True, fixed=True)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the stream x + residual, the stream in the dtype of `residual`)."""
    return _added(x, residual, weight, eps, False)


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same with Gemma's weight."""
    return _added(x, residual, weight, eps, True)


def _added(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    wanted = x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    if wanted and _grad_enabled():
        return _Norm.apply(x, residual, weight, eps, gemma)  # type: ignore[no-any-return, no-untyped-call]
    out, stream = norm(x, residual, weight, eps, gemma)
    assert stream is not None
    return out, stream


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    gemma: bool,
    config: NormConfig | None = None,
    fixed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One launch; `config` is for measuring. `fixed`: as many rows as there are, a row is summed in one way."""
    if x.is_contiguous() and (residual is None or residual.is_contiguous()) and config is None:
        key = (
            x.shape, x.dtype, x.get_device(), None if weight is None else weight.dtype,
            None if residual is None else residual.dtype, gemma, fixed,
        )  # fmt: skip
        plan = _plans.get(key)
        if plan is not None and (weight is None or weight.is_contiguous()):
            out = torch.empty_like(x)
            stream = None if residual is None else torch.empty_like(residual)
            _forward.go(plan, (x, residual, weight, out, stream), (eps,))
            return out, stream
    else:
        key = None
    width = x.shape[-1]
    flat, step = rows_of(x, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added, stream, added_step = None, None, step
    if residual is not None:
        added, added_step = rows_of(residual, width)
        stream = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    count = out.numel() // width if width else 0
    if count == 0:
        return out, stream
    chosen = config or norm_config(count, width, residual is not None, twice=not fixed)
    block = next_power(width)
    if weight is not None and weight.stride(0) != 1:
        weight = weight.contiguous()
    unit = unit_of(step, added_step, width)
    plan = Plan(
        (min(chosen.programs, count), 1, 1),
        (count, width // unit, step // unit, added_step // unit),
        (
            chosen.rows, block, block == width, unit, residual is not None, weight is not None, gemma, chosen.depth,
            chosen.again and block == width and residual is None,
        ),
        chosen.warps,
    )  # fmt: skip
    if key is not None:
        remember(_plans, key, plan)
    _forward.go(plan, (flat, added, weight, out, stream), (eps,))
    return out, stream


def rows_of(x: Tensor, width: int) -> tuple[Tensor, int]:
    """The tensor as rows with one step between them, copied where its memory order has none."""
    if x.is_contiguous():
        return x, width
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    flat = x.reshape(-1, width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, flat.stride(0)


def gradients(
    grad: Tensor, stream_grad: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, gemma: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the normalised rows `x` (in the dtype of x) and of the weight."""
    width = x.shape[-1]
    given, grad_step = rows_of(grad, width)
    flat, step = rows_of(x, width)
    if stream_grad is not None:
        stream_grad = stream_grad.contiguous()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = result.numel() // width if width else 0
    if weight is not None and weight.stride(0) != 1:
        weight = weight.contiguous()
    if count == 0:
        return result, None if weight is None else torch.zeros_like(weight)
    block = next_power(width)
    programs = min(count, 4 * sm_count(x.device))
    sums = None if weight is None else torch.empty((programs, width), dtype=torch.float32, device=x.device)
    unit = unit_of(grad_step, step, width)
    _backward(
        (programs, 1, 1),
        (given, stream_grad, flat, weight, result, sums),
        (count, width // unit, grad_step // unit, step // unit, eps),
        (block, unit, stream_grad is not None, weight is not None, gemma),
        4 if block <= 2048 else 8 if block <= 8192 else 16,
    )
    return result, None if weight is None or sums is None else sums.sum(dim=0).to(weight.dtype)


class _Norm(torch.autograd.Function):
    """The norm of x or, with a residual, of their sum, which is the second result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, gemma: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, stream = norm(x, residual, weight, eps, gemma)
        ctx.save_for_backward(x if stream is None else stream, weight)
        ctx.eps, ctx.gemma, ctx.kinds = eps, gemma, (x.dtype, None if residual is None else residual.dtype)
        return out, stream

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, grad: Tensor, stream_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_x, of_residual = ctx.kinds
        found, to_weight = gradients(grad, stream_grad, rows, weight, ctx.eps, ctx.gemma)
        return found.to(of_x), None if of_residual is None else found.to(of_residual), to_weight, None, None
