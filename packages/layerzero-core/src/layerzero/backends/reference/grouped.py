"""Grouped attention: plain attention, once for each group of queries and each sequence."""

from __future__ import annotations

from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.reference.varlen import one_by_one
from layerzero.model.attention import Attended
from layerzero.model.grouped import GroupedBatch


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
    alignment = "bottom_right" if causal else False

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Attended:
        return attention(q, k, v, None, 0.0, alignment, scale, None, None, slopes, return_lse)

    return one_by_one(attend, query, keys, values, batch.spans(), None, return_lse)
