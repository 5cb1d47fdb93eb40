"""A rough price of a call on plain torch, for one question: is it worth running it once more to compare?"""

from __future__ import annotations

from typing import Any

from layerzero.dispatch import modes
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero.model.op import Op, OperationSpec

__all__ = ["price_us"]

# Operations and bytes per µs that plain torch code reaches with some ease; in half precision a CPU computes slower.
_CPU_OPS, _CPU_HALF_OPS, _CPU_BYTES = 2e4, 5e3, 2e3
_GPU_OPS, _GPU_BYTES = 1e7, 3e5
_PASSES = 4.0  # over its inputs, of a formula written in torch


def price_us(op: OperationSpec, ctx: Context, args: tuple[Any, ...]) -> float:
    """Estimated µs of the call as torch code; 0 for what has no tensors."""
    held = sum(item.numel() * item.element_size() for item in modes.tensors_of(args))
    work = operations(op, ctx)
    if ctx.device.platform is Platform.CPU:
        rate = _CPU_HALF_OPS if ctx.dtype in ("float16", "bfloat16") else _CPU_OPS
        return work / rate + _PASSES * held / _CPU_BYTES
    return work / _GPU_OPS + _PASSES * held / _GPU_BYTES


def operations(op: OperationSpec, ctx: Context) -> float:
    """Multiplications and additions of a call; 0 for an op that does not say."""
    return float(op.cost(ctx).flops) if isinstance(op, Op) and op.cost is not None else 0.0
