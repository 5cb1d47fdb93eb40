"""The op, declared once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.plugin import Call, Context, Op, expect_shape, expect_tensor, simple_context

__all__ = ["RMS_NORM_GATED", "rms_norm_gated"]


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """rms_norm(x) * weight * silu(gate) over the last axis; computed in float32, returned in x's dtype."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(wide)
    return (out * F.silu(gate.to(wide))).to(x.dtype)


def _describe(call: Call) -> Context:
    x, gate, weight, _ = call.args
    hidden = expect_tensor(x, "x").shape[-1]
    expect_shape(expect_tensor(gate, "gate"), "gate", tuple(x.shape))
    expect_shape(weight, "weight", (hidden,))
    dims = {"rows": x.numel() // hidden, "hidden": hidden}
    needs = () if weight is not None else ("no_weight",)
    return simple_context(call, "rms_norm_gated", x, {"gate": gate, "weight": weight}, dims, needs, mixed=True)


def _example(draw: Any) -> tuple[Any, ...]:
    x = draw.main(*draw.rows_of("rows", "hidden"))
    weight = None if "no_weight" in draw.ctx.needs else draw.leaf(draw.normal(x.shape[-1], scale=0.1) + 1.0)
    return x, draw.leaf(draw.normal(*x.shape)), weight, 1e-6


def _baseline(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """What a torch user writes."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps) * F.silu(gate)


RMS_NORM_GATED = Op(
    function=rms_norm_gated,
    describe=_describe,
    features=("no_weight",),
    sizes={"rows": (3, 64), "hidden": (64, 160)},
    example=_example,
    fake=lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    tolerance="norm",
    baseline=_baseline,
    growing=("rows",),
    row_wise=(0, 1),
    fusable=True,
)
