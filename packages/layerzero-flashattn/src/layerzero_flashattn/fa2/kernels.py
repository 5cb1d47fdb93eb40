"""Adapters over `flash_attn`, version 2.

The `deterministic_` twins ask for the backward that adds up in a fixed order; the forward always does.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import upright
from layerzero.model.kv_cache import PagedBatch
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.interface import dense, float32, varlen
from layerzero_flashattn.shared import NO_WINDOW, dead_rows, packed_offsets

__all__ = [
    "attention",
    "deterministic_attention",
    "deterministic_varlen_attention",
    "paged_decode",
    "paged_prefill",
    "varlen_attention",
]

# Not `import flash_attn`: FlashAttention 4 may own that name without bringing this library.
_library: Any = importlib.import_module("flash_attn.flash_attn_interface")
_varlen_func = _library.flash_attn_varlen_func
_with_kvcache = _library.flash_attn_with_kvcache

attention = dense(_library.flash_attn_func)
varlen_attention = varlen(_varlen_func)
deterministic_attention = GradientVariant(attention, deterministic=True)
deterministic_varlen_attention = GradientVariant(varlen_attention, deterministic=True)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_with_kvcache` for one new token a sequence; lengths and page numbers stay on the device."""
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    found = _with_kvcache(
        query.unsqueeze(1),
        key_cache,
        value_cache,
        cache_seqlens=batch.context_lens.to(torch.int32),
        block_table=batch.block_tables.to(torch.int32),
        softmax_scale=scale,
        causal=True,
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        alibi_slopes=float32(alibi_slopes),
        return_softmax_lse=return_lse,
    )
    return (found[0].squeeze(1), found[1].squeeze(-1)) if return_lse else found.squeeze(1)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_varlen_func` over pages, for any number of new tokens a sequence."""
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    cu_seqlens_q, cu_seqlens_k = packed_offsets(batch, query.device)
    found = _varlen_func(
        query,
        key_cache,
        value_cache,
        cu_seqlens_q,
        cu_seqlens_k,
        batch.max_query_len,
        batch.max_context_len,
        softmax_scale=scale,
        causal=True,
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        alibi_slopes=float32(alibi_slopes),
        return_attn_probs=return_lse,
        block_table=batch.block_tables.to(torch.int32),
    )
    return (found[0], dead_rows(found[1]).transpose(0, 1)) if return_lse else found
