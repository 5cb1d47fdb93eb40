"""Scaled dot-product attention, written out.

The scores pass these steps, in this order (the order of FlashAttention): scale, softcap, ALiBi bias, additive mask,
then everything that may not be attended (boolean mask, causal triangle, window) becomes -inf.

Positions. Query row i stands at key position i + (Sk - Sq), aligned to the end (bottom right), for ALiBi and for a
window. Only `is_causal=True`, which is top-left by SDPA's definition, puts row i at key position i, for the
triangle and the window alike; ALiBi does not notice the shift, since softmax ignores a constant per row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype, no_autocast
from layerzero.model.attention import alibi_bias, band
from layerzero.model.masks import BlockMask, ChunkMask, dense_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | ChunkMask | None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over [B, H, S, D] tensors; key and value may have fewer heads (GQA, MQA).

    A row that may attend nothing gives zeros, and -inf as its log-sum-exp. The log-sum-exp is natural, float32,
    [B, Hq, Sq]. Dropout draws from torch's global generator. Sinks [Hq] are the score of one more key without a value.
    """
    mask: Tensor | None = dense_mask(attn_mask, query.shape[-2], key.shape[-2], query.device)
    dtype = compute_dtype(query, key, value)
    with no_autocast(query.device.type):
        scores = _scores(query.to(dtype), key.to(dtype), scale, softcap)
        if alibi_slopes is not None:
            scores = scores + alibi_bias(alibi_slopes.to(dtype), query.shape[-2], key.shape[-2])
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask.to(dtype)
        allowed = band(is_causal, window, query.shape[-2], key.shape[-2], query.device)
        if mask is not None and mask.dtype == torch.bool:
            allowed = mask if allowed is None else allowed & mask
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)

        if sinks is not None:
            column = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        # A row of nothing but -inf has no softmax: compute it on zeros, then blank the result, so that neither
        # the output nor a gradient turns into NaN.
        dead = (scores == -math.inf).all(dim=-1, keepdim=True)
        scores = scores.masked_fill(dead, 0.0)
        weights = torch.softmax(scores, dim=-1).masked_fill(dead, 0.0)
        if sinks is not None:
            weights = weights[..., :-1]
        if dropout_p > 0.0:
            weights = F.dropout(weights, dropout_p)
        out = _weighted_sum(weights, value.to(dtype)).to(query.dtype)
        if not return_lse:
            return out
        lse = torch.logsumexp(scores, dim=-1).masked_fill(dead.squeeze(-1), -math.inf)
    return out, lse.to(torch.float32)


def _scores(query: Tensor, key: Tensor, scale: float | None, softcap: float | None) -> Tensor:
    """Scaled (and capped) scores [B, Hq, Sq, Sk]. The heads of one GQA group share a matrix product."""
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_k = key.shape[1], key.shape[2]
    factor = 1.0 / math.sqrt(head_dim or 1) if scale is None else scale
    grouped = (query * factor).reshape(batch, kv_heads, heads // max(kv_heads, 1) * seq_q, head_dim)
    scores = (grouped @ key.transpose(-1, -2)).reshape(batch, heads, seq_q, seq_k)
    return scores if not softcap else softcap * torch.tanh(scores / softcap)


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    batch, heads, seq_q, seq_k = weights.shape
    kv_heads = value.shape[1]
    grouped = weights.reshape(batch, kv_heads, heads // max(kv_heads, 1) * seq_q, seq_k)
    return (grouped @ value).reshape(batch, heads, seq_q, value.shape[-1])
