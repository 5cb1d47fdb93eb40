"""torch's own dtype conversion, for the pairs where it is the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

# A number farther out than this would round to one that E4M3 does not have.
_E4M3_OVERFLOW = 464.0


def cast(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """`Tensor.to`, always a new tensor; what does not fit is taken care of before."""
    if saturate and dtype != torch.bool:
        x = _clamped(x, dtype)
    elif dtype == torch.float8_e4m3fn:
        x = x.to(torch.float32)
        x = _clamped(x.masked_fill(x.abs() > _E4M3_OVERFLOW, float("nan")), dtype)
    return x.to(dtype, copy=True)


def _clamped(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        # eight and sixteen bits cannot hold every limit they are compared with
        return x.to(torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32).clamp(-largest, largest)
    limits = torch.iinfo(dtype)
    return x.to(torch.int64).clamp(limits.min, limits.max)
