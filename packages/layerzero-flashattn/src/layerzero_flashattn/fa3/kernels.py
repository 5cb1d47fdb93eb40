"""Adapters over `flash_attn_interface`, the library of FlashAttention 3."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import upright
from layerzero.model.kv_cache import PagedBatch
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.interface import dense, varlen
from layerzero_flashattn.shared import NO_WINDOW, dead_rows, packed_offsets

__all__ = [
    "attention",
    "deterministic_attention",
    "deterministic_varlen_attention",
    "paged_decode",
    "paged_prefill",
    "varlen_attention",
]

_library: Any = importlib.import_module("flash_attn_interface")
_with_kvcache = _library.flash_attn_with_kvcache

attention = dense(_library.flash_attn_func)
varlen_attention = varlen(_library.flash_attn_varlen_func)
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
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_with_kvcache` for one new token a sequence; lengths and page numbers stay on the device."""
    found = _cached(query.unsqueeze(1), key_cache, value_cache, batch, scale, window, softcap, return_lse)
    return (found[0].squeeze(1), found[1].squeeze(-1)) if return_lse else found.squeeze(1)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_with_kvcache` over packed queries, for any number of new tokens a sequence."""
    cu_seqlens_q, _ = packed_offsets(batch, query.device)
    packed = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": batch.max_query_len}
    found = _cached(query, key_cache, value_cache, batch, scale, window, softcap, return_lse, **packed)
    return (found[0], dead_rows(found[1]).transpose(0, 1)) if return_lse else found


def _cached(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    return_lse: bool,
    **packed: Any,
) -> Any:
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    return _with_kvcache(
        query,
        key_cache,
        value_cache,
        cache_seqlens=batch.context_lens.to(torch.int32),
        page_table=batch.block_tables.to(torch.int32),
        softmax_scale=scale,
        causal=True,
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        return_softmax_lse=return_lse,
        **packed,
    )
