"""Adapters over `flash_attn`, version 2.

The `deterministic_` twins ask for the backward that adds up in a fixed order; the forward always does.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.interface import dense, packed_offsets, paged, varlen

# Not `import flash_attn`: FlashAttention 4 may own that name without bringing this library.
_library: Any = importlib.import_module("flash_attn.flash_attn_interface")
_varlen_func = _library.flash_attn_varlen_func
_with_kvcache = _library.flash_attn_with_kvcache

attention = dense(_library.flash_attn_func)
varlen_attention = varlen(_varlen_func)
deterministic_attention = GradientVariant(attention, deterministic=True)
deterministic_varlen_attention = GradientVariant(varlen_attention, deterministic=True)


def _decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, return_lse: bool, **options: Any
) -> Any:
    lengths, pages = batch.context_lens.to(torch.int32), batch.block_tables.to(torch.int32)
    options.update(cache_seqlens=lengths, block_table=pages, return_softmax_lse=return_lse)
    return _with_kvcache(query, key_cache, value_cache, **options)


def _prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, return_lse: bool, **options: Any
) -> Any:
    """`flash_attn_varlen_func` over pages."""
    lengths = (*packed_offsets(batch, query.device), batch.max_query_len, batch.max_context_len)
    options.update(block_table=batch.block_tables.to(torch.int32), return_attn_probs=return_lse)
    return _varlen_func(query, key_cache, value_cache, *lengths, **options)


paged_decode, paged_prefill = paged(_decode), paged(_prefill, prefill=True)
