"""Attention over a paged KV cache, read in place: pages are followed by pointer, nothing is gathered.

`fixed` computes any number of queries in one way, as its namesake of `attention` does; packed sequences are pages of
one token to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero_cpu.attention import DECODE_ROWS
from layerzero_cpu.library import native

__all__ = ["fixed", "fixed_varlen", "paged_attention"]

_decode = native.attention_paged_decode
_prefill = native.attention_paged_prefill


def paged_attention(
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
    sinks: Tensor | None = None,
    is_causal: bool = True,
    *,
    run: Any = None,
) -> Any:
    """Attention, bottom-right aligned, of packed queries [tokens, Hq, D] over the pages of their sequences."""
    tokens, heads, dim = query.shape
    hnd = layout == "HND"
    out = query.new_empty((tokens, heads, value_cache.shape[3]))
    lse = torch.empty((tokens, heads), dtype=torch.float32) if return_lse else None
    if alibi_slopes is not None and alibi_slopes.dtype is not torch.float32:
        alibi_slopes = alibi_slopes.to(torch.float32)
    left, right = (-1, -1) if window is None else window
    rows = batch.max_query_len * heads
    run = run or (_decode if rows <= DECODE_ROWS * key_cache.shape[1 if hnd else 2] else _prefill)
    factor, cap = 1.0 / math.sqrt(dim) if scale is None else scale, softcap or 0.0
    tables, contexts, lengths = batch.block_tables, batch.context_lens, batch.query_lens
    order = hnd + 2 * (not is_causal)
    last = () if sinks is None else (sinks.to(torch.float32),)
    more = (tables, contexts, lengths, out, lse, alibi_slopes, factor, cap, left, right, order, *last)
    if run(query, key_cache, value_cache, *more) is False:
        run(query.contiguous(), key_cache.contiguous(), value_cache.contiguous(), *more)
    return out if lse is None else (out, lse)


def fixed(*args: Any) -> Any:
    """The same, computed in one way for any number of queries and keys."""
    return paged_attention(*args, run=native.attention_paged_fixed)


def fixed_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Any:
    """Attention over packed sequences, bottom-right aligned: each token of the keys is a page."""
    keys, queries = cu_seqlens_k.diff(), cu_seqlens_q.diff()
    places = cu_seqlens_k[:-1, None] + torch.arange(max(1, max_seqlen_k), dtype=cu_seqlens_k.dtype)
    batch = PagedBatch(places, keys, queries, tuple(keys.tolist()), tuple(queries.tolist()))
    rest = (scale, window, softcap, alibi_slopes, return_lse, "NHD", sinks, bool(is_causal))
    return fixed(query, key.unsqueeze(1), value.unsqueeze(1), batch, *rest)
