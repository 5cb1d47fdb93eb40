"""Adapters over `flash_attn_interface`, the library of FlashAttention 3."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.interface import dense, packed_offsets, paged, varlen

_library: Any = importlib.import_module("flash_attn_interface")
_with_kvcache = _library.flash_attn_with_kvcache

attention = dense(_library.flash_attn_func)
varlen_attention = varlen(_library.flash_attn_varlen_func)
deterministic_attention = GradientVariant(attention, deterministic=True)
deterministic_varlen_attention = GradientVariant(varlen_attention, deterministic=True)


def _cached(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, return_lse: bool, **options: Any
) -> Any:
    lengths, pages = batch.context_lens.to(torch.int32), batch.block_tables.to(torch.int32)
    options.update(cache_seqlens=lengths, page_table=pages, return_softmax_lse=return_lse)
    return _with_kvcache(query, key_cache, value_cache, **options)


def _packed(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, return_lse: bool, **options: Any) -> Any:
    """`flash_attn_with_kvcache` over packed queries."""
    options.update(cu_seqlens_q=packed_offsets(batch, query.device)[0], max_seqlen_q=batch.max_query_len)
    return _cached(query, keys, values, batch, return_lse, **options)


paged_decode, paged_prefill = paged(_cached), paged(_packed, prefill=True)
