"""Grouped attention: plain attention, once for each group of queries and each sequence."""

from __future__ import annotations

from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.precision import compute_dtype
from layerzero.model.attention import Attended, packed
from layerzero.model.grouped import GroupedBatch, Segment


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: GroupedBatch,
    causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Attended:
    """Attention of packed queries [total_q, Hq, D] over the first keys of their sequences, [total_k, Hkv, D] packed.

    Causal is bottom-right: the last query of a segment sees all keys of its group. A query without any key gives
    zeros. The log-sum-exp, when asked for, is [total_q, Hq].
    """
    dtype = compute_dtype(query, key, value)
    # Widened before they are cut into prefixes: the gradients of overlapping prefixes then add up in this precision.
    keys, values = key.to(dtype), value.to(dtype)

    def attended(segment: Segment) -> Attended:
        queries = _heads_first(query, segment.q_start, segment.q_len)
        prefix_k, prefix_v = (_heads_first(item, segment.k_start, segment.kv_len) for item in (keys, values))
        alignment = "bottom_right" if causal else False
        return attention(queries, prefix_k, prefix_v, None, 0.0, alignment, scale, None, None, None, return_lse)

    return packed(map(attended, batch.segments()), query, value, return_lse)


def _heads_first(tokens: Tensor, start: int, length: int) -> Tensor:
    """Some rows of [tokens, H, D] as [1, H, length, D]."""
    return tokens[start : start + length].transpose(0, 1).unsqueeze(0)
