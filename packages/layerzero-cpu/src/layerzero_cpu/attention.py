"""Attention by our own kernels: canonical arguments in, native calls out.

Few query rows for each key head go to the decode kernel, which reads each key once for all heads of a group and splits
the keys over threads; more go to the prefill kernel, which works in blocks. Both hold no score matrix. `fixed` has the
blocks do all of it: the bits of a row are then the same whatever else is in the call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero_cpu.library import adapted, in_python, native

__all__ = ["DECODE_ROWS", "attention", "causal_word", "fixed"]

DECODE_ROWS = 16  # query rows of one key head up to which reading the cache costs more than the products

_decode = native.attention_decode
_prefill = native.attention_prefill
_empty = torch.empty


@adapted
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
    *,
    run: Any = None,
) -> Any:
    """Attention over [B, H, S, D] tensors of any strides whose last axis is dense; GQA without expanding keys."""
    batch, heads, queries, dim = query.shape
    dim_v = value.shape[3]
    out = torch.empty_like(query) if dim == dim_v else query.new_empty((batch, heads, queries, dim_v))
    lse = _empty((batch, heads, queries), dtype=torch.float32) if return_lse else None
    if attn_mask is not None and attn_mask.ndim < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if alibi_slopes is not None and alibi_slopes.dtype is not torch.float32:
        alibi_slopes = alibi_slopes.to(torch.float32)
    left, right = (-1, -1) if window is None else window
    run = run or (_decode if queries * heads <= DECODE_ROWS * key.shape[1] else _prefill)
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    last = () if sinks is None else (sinks.to(torch.float32),)
    rest = (attn_mask, alibi_slopes, factor, softcap or 0.0, causal_word(is_causal), left, right, *last)
    if run(query, key, value, out, lse, *rest) is False:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = query.new_empty((batch, heads, queries, dim_v))
        run(query, key, value, out, lse, *rest)
    return out if lse is None else (out, lse)


def fixed(*args: Any) -> Any:
    """The same, computed in one way for any number of queries and keys."""
    return in_python["attention"](*args, run=native.attention_fixed)


def causal_word(is_causal: bool | str) -> int:
    """0: not causal, 1: aligned top left as in SDPA, 2: bottom right."""
    return (1 if is_causal is True else 2) if is_causal else 0
