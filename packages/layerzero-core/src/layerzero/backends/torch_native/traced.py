"""Groups of rows and experts as a compiler traces them where a gradient is needed: torch's own grouped product where it
takes the tensors; the reference, which multiplies by every expert, comes last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference import moe as reference
from layerzero.backends.torch_native import moe as native


def grouped_gemm(x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of x, group after group, each times its group's weight transposed."""
    if _groupable(x, weights, weights.shape[1]):
        return native.grouped_gemm(x, weights, group_sizes)
    return reference.grouped_gemm(x, weights, group_sizes)


def moe(x: Tensor, gate_up: Any, down: Any, *rest: Any) -> Tensor:
    """The weighted sum of each token's experts."""
    plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    alike = plain and gate_up.dtype == down.dtype and down.is_contiguous() and _groupable(x, gate_up, down.shape[2])
    return native.moe(x, gate_up, down, *rest) if alike else reference.moe(x, gate_up, down, *rest)


def _groupable(x: Tensor, weights: Tensor, other: int) -> bool:
    fits = x.shape[1] % 8 == 0 and other % 8 == 0
    return fits and x.dtype == torch.bfloat16 and weights.dtype == torch.bfloat16 and weights.is_contiguous()
