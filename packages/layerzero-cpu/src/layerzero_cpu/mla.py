"""Latent attention (MLA) over a paged cache, read in place: each latent vector once for all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero_cpu.library import native

__all__ = ["mla_paged_attention"]


def mla_paged_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Any:
    """Causal, bottom-right attention of [tokens, H, ckv] and [tokens, H, kpe] over pages of latent vectors."""
    tokens, heads, width = q_nope.shape
    out = q_nope.new_empty((tokens, heads, width))
    lse = torch.empty((tokens, heads), dtype=torch.float32) if return_lse else None
    more = (batch.block_tables, batch.context_lens, batch.query_lens, out, lse, scale)
    given = (q_nope, q_pe, ckv_cache, kpe_cache)
    if native.attention_latent_decode(*given, *more) is False:
        native.attention_latent_decode(*(item.contiguous() for item in given), *more)
    return out if lse is None else (out, lse)
