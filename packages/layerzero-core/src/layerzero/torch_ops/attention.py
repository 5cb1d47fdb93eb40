"""`lz.attention` in plain torch: it takes `F.scaled_dot_product_attention` wherever that computes exactly the same.

This is traced and differentiated where an opaque op will not do, and runs what an op cannot carry: dropout, whose
backward must see the same random numbers. In graphs the op has an overload of its own (`sites`).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.dispatch.adapt import squeeze, swap_back, swap_layout, unsqueeze
from layerzero.errors import InvalidInputError
from layerzero.model.folding import fold, is_folded, unfold
from layerzero.torch_ops.lowering import causal_word
from layerzero.torch_ops.opaque import autocast_dtype
from layerzero.torch_ops.sites import CALL

__all__ = ["CALL", "attend"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_attention = importlib.import_module("layerzero.backends.reference.attention")


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *rest: Any) -> Any:
    """Attention in any layout and rank, with dropout and log-sum-exp: its canonical arguments, then its layout."""
    is_causal, layout = rest[1], rest[-1]
    if is_folded(query, key, value, layout):
        how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
        return unfold(attend(query, key, value, attn_mask, *rest), how)
    if attn_mask is not None and is_causal:
        raise InvalidInputError(code="MASK_WITH_CAUSAL", value=causal_word(is_causal))
    if layout not in ("BHSD", "BSHD"):
        raise InvalidInputError(code="LAYOUT_UNKNOWN", value=str(layout), limit="BHSD, BSHD")
    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype != torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    values = [query, key, value, attn_mask, *rest[:-1]]
    if query.dim() == 3:
        unsqueeze(values)
        return squeeze(_attend(*values))
    if layout == "BSHD":
        swap_layout(values)
        return swap_back(_attend(*values))
    return _attend(*values)


def _attend(
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
) -> Any:
    aligned = is_causal != "bottom_right" or query.shape[2] == key.shape[2]
    fused = aligned and window is None and softcap is None and alibi_slopes is None and sinks is None and not return_lse
    if is_causal and scale is not None and scale <= 0:
        fused = False  # torch's fused kernels mask before they scale
    if dropout_p == 1.0:
        fused = False  # nor do all of them take it
    if fused and query.dtype == key.dtype and query.dtype == value.dtype:
        return _sdpa(query, key, value, attn_mask, dropout_p, bool(is_causal), scale)
    rest = (scale, window, softcap, alibi_slopes, return_lse, sinks)
    return _attention.attention(query, key, value, attn_mask, dropout_p, is_causal, *rest)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> Tensor:
    """torch's own attention. Rows that may attend nothing are kept away from it: its kernels disagree about them."""
    grouped = bool(query.shape[1] != key.shape[1])
    if mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, causal, scale=scale, enable_gqa=grouped
        )
    if mask.dtype == torch.bool:
        dead = ~mask.any(dim=-1, keepdim=True)
        mask = mask | dead
    else:
        dead = (mask == -math.inf).all(dim=-1, keepdim=True)
        mask = mask.masked_fill(dead, 0.0).to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=grouped)
    return out.masked_fill(dead, 0.0)
