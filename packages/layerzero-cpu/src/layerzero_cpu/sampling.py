"""Sampling one token a row of logits without a sort. Canonical arguments of `sample`, `sample_topk`, `sample_topp`.

Same tokens as the reference for the same generator state: one uniform float64 a row is drawn as it draws it, the same
tokens are kept, and the draw walks them in the order of their ids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_cpu.library import adapted, done, native

__all__ = ["sample", "sample_topk", "sample_topp"]

Param = float | Tensor

_sample = native.sample
_rand = torch.rand
_empty = torch.empty
_int64, _float64 = torch.int64, torch.float64


@adapted
def sample_topk(logits: Tensor, k: int | Tensor, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the k likeliest tokens of each row."""
    return sample(logits, k, None, None, temperature, generator)


@adapted
def sample_topp(logits: Tensor, p: Param, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the smallest set of likeliest tokens whose probabilities reach p."""
    return sample(logits, None, p, None, temperature, generator)


@adapted
def sample(
    logits: Tensor,
    top_k: int | Tensor | None,
    top_p: Param | None,
    min_p: Param | None,
    temperature: Param,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw with all filters at once. None, and top_k <= 0, leave a filter out. Returns int64 [B]."""
    batch = logits.shape[0]
    out = _empty(batch, dtype=_int64)
    uniform = None
    if isinstance(temperature, Tensor) or temperature > 0:
        uniform = _rand((batch, 1), generator=generator, dtype=_float64)
    ks, k = _both(top_k)
    ps, p = _both(top_p)
    least, m = _both(min_p)
    warm, t = _both(temperature)
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        logits = logits.contiguous()
    done(_sample(logits, out, uniform, ks, k, ps, p, least, m, warm, t))
    return out


def _both(value: Any) -> tuple[Tensor | None, Any]:
    """A parameter as a tensor of one a row, or as a number; -1 leaves a filter out."""
    if value is None:
        return None, -1
    if isinstance(value, Tensor):
        return (value if value.is_cpu else value.cpu()), -1
    return None, value
