"""Multi-head latent attention over a paged cache (DeepSeek): gather each sequence's pages, then plain attention.

The cache holds for each token one latent vector, shared by all heads, and one rotated key. With the up-projections
absorbed into the query and the output, the latent vector is key and value at once, and this is attention with a single
KV head: key [latent, rotated], value [latent].
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.paged import gather, sequences
from layerzero.model.attention import Attended, packed
from layerzero.model.kv_cache import PagedBatch

__all__ = ["mla_paged_attention"]


def mla_paged_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Attended:
    """Causal (bottom-right) attention of [total_q, H, ckv] and [total_q, H, kpe] over the pages of their sequences.

    The caches are [blocks, page, ckv] and [blocks, page, kpe]; the result is [total_q, H, ckv]. A sequence with no
    context gives zeros. The log-sum-exp, when asked for, is [total_q, H].
    """
    query = torch.cat((q_nope, q_pe), dim=-1)

    def sequence(row: int, queries: Tensor, pages: Tensor, length: int) -> Attended:
        latent, rotated = (gather(cache.unsqueeze(2), pages, length) for cache in (ckv_cache, kpe_cache))
        keys = torch.cat((latent, rotated), dim=-1)
        return attention(queries, keys, latent, None, 0.0, "bottom_right", scale, None, None, None, return_lse)

    found = (sequence(*item) for item in sequences(batch, query, ckv_cache.shape[1]))
    return packed(found, query, ckv_cache, return_lse)
