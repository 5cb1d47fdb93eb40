"""Multi-head latent attention over a paged cache (DeepSeek): gather each sequence's pages, then plain attention.

The cache holds for each token one latent vector, shared by all heads, and one rotated key. With the up-projections
absorbed into the query and the output, the latent vector is key and value at once, and this is attention with a single
KV head: key [latent, rotated], value [latent].
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.paged import one_by_one
from layerzero.model.attention import Attended
from layerzero.model.kv_cache import PagedBatch


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

    def attend(queries: Tensor, rotated: Tensor, latent: Tensor, _: Tensor | None) -> Attended:
        keys = torch.cat((latent, rotated), dim=-1)
        return attention(queries, keys, latent, None, 0.0, "bottom_right", scale, None, None, None, return_lse)

    return one_by_one(attend, query, (kpe_cache.unsqueeze(2), ckv_cache.unsqueeze(2)), batch, return_lse=return_lse)
