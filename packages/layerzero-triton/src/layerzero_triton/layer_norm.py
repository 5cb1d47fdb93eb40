"""LayerNorm over the last axis. Canonical arguments of `layer_norm`; without a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_triton.config import next_power, norm_config, unit_of
from layerzero_triton.kernels import layer_norm as device
from layerzero_triton.kernels.launch import Launcher, Plan, remember
from layerzero_triton.norm import rows_of

_forward = Launcher(device.forward)
_plans: dict[Any, Plan] = {}


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once."""
    key: Any = None
    if weight is not None and weight.stride(0) != 1:
        weight = weight.contiguous()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    if x.is_contiguous():
        key = (
            x.shape, x.dtype, x.get_device(), None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
        )  # fmt: skip
        plan = _plans.get(key)
        if plan is not None:
            out = torch.empty_like(x)
            _forward.go(plan, (x, weight, bias, out), (eps,))
            return out
    width = x.shape[-1]
    flat, step = rows_of(x, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = out.numel() // width if width else 0
    if count == 0:
        return out
    chosen = norm_config(count, width, False)
    block, unit = next_power(width), unit_of(step, width)
    plan = Plan(
        (min(chosen.programs, count), 1, 1),
        (count, width // unit, step // unit),
        (chosen.rows, block, block == width, unit, weight is not None, bias is not None),
        chosen.warps,
    )
    if key is not None:
        remember(_plans, key, plan)
    _forward.go(plan, (flat, weight, bias, out), (eps,))
    return out
