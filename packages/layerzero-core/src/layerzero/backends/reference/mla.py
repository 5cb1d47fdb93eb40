"""Multi-head latent attention over a paged cache (DeepSeek): gather each sequence's pages, then plain attention.

The cache holds for each token one latent vector, shared by all heads, and one rotated key. With the up-projections
absorbed into the query and the output, the latent vector is key and value at once, and this is attention with a single
KV head: key [latent, rotated], value [latent].
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal (bottom-right) attention of [total_q, H, ckv] and [total_q, H, kpe] over the pages of their sequences.

    The caches are [blocks, page, ckv] and [blocks, page, kpe]; the result is [total_q, H, ckv]. A sequence with no
    context gives zeros. The log-sum-exp, when asked for, is [total_q, H].
    """
    query = torch.cat((q_nope, q_pe), dim=-1)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    start = 0
    for row, (context_len, query_len) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        if query_len == 0:
            continue
        pages = batch.block_tables[row, : -(-context_len // ckv_cache.shape[1])]
        latent = _gather(ckv_cache, pages, context_len)
        keys = torch.cat((latent, _gather(kpe_cache, pages, context_len)), dim=-1)
        queries = query[start : start + query_len].transpose(0, 1).unsqueeze(0)
        result = attention(queries, keys, latent, None, 0.0, "bottom_right", scale, None, None, None, return_lse)
        out, lse = result if isinstance(result, tuple) else (result, None)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0].transpose(0, 1))
        start += query_len
    packed = torch.cat(outs) if outs else q_nope.new_zeros((0, *q_nope.shape[1:]))
    if not return_lse:
        return packed
    return packed, torch.cat(lses) if lses else q_nope.new_zeros((0, q_nope.shape[1]), dtype=torch.float32)


def _gather(cache: Tensor, pages: Tensor, context_len: int) -> Tensor:
    """The first `context_len` cached tokens of one sequence as [1, 1, context_len, width]."""
    # index_select, unlike cache[pages], refuses a negative page number instead of wrapping it to another sequence.
    return torch.index_select(cache, 0, pages).flatten(0, 1)[:context_len].unsqueeze(0).unsqueeze(0)
