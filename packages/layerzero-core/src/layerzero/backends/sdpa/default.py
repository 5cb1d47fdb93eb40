"""What a torch user writes: `F.scaled_dot_product_attention`, which chooses among torch's own kernels.

For the calls that no single one of those kernels takes: other dtypes, an alignment, a window or ALiBi as a mask. Packed
sequences are attended one by one, and the pages of a cache are gathered first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.paged import gather, sequences
from layerzero.backends.sdpa.varlen import mask_of
from layerzero.model.attention import packed, upright
from layerzero.model.kv_cache import PagedBatch

__all__ = ["attention", "latent_pages", "pages", "varlen"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: Any,
    alibi_slopes: Tensor | None,
    return_lse: bool,
) -> Tensor:
    """SDPA with whatever it has no argument for as a mask."""
    rows, cols = query.shape[2], key.shape[2]
    plain = window is None and alibi_slopes is None and attn_mask is None
    causal = bool(is_causal) and plain and (is_causal is True or rows == cols)
    if not causal:
        bias = mask_of(rows, cols, is_causal, window, alibi_slopes, query)
        attn_mask = _joined(attn_mask, bias, query.dtype)
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _joined(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask and a bias as one, in a type that SDPA takes beside the query."""
    if bias is None:
        return mask if mask is None or mask.dtype is torch.bool else mask.to(dtype)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else bias + mask
    return bias.to(dtype)


def varlen(
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
    softcap: Any,
    alibi_slopes: Tensor | None,
    return_lse: bool,
) -> Any:
    """SDPA for one packed sequence after another; the host reads where they begin."""
    spans = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)

    def results() -> Iterator[Tensor]:
        for row, (of_q, of_k) in enumerate(spans):
            if of_q[0] == of_q[1]:
                continue
            parts = (query[slice(*of_q)], key[slice(*of_k)], value[slice(*of_k)])
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            yield _sequence(q, k, v, is_causal, scale, window, _of(alibi_slopes, row))

    return packed(results(), query, value, False)


def pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: Any,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
) -> Any:
    """Gather the pages, then SDPA: over the whole batch where every sequence decodes one token, else one by one."""
    if _decodes(batch) and window is None and alibi_slopes is None:
        keys, values = (_padded(cache, batch, layout) for cache in (key_cache, value_cache))
        return _decoded(query, keys, values, batch, scale)
    page = key_cache.shape[1] if layout == "NHD" else key_cache.shape[2]

    def sequence(row: int, queries: Tensor, own: Tensor, length: int) -> Tensor:
        keys, values = (gather(cache, own, length, layout) for cache in (key_cache, value_cache))
        return _sequence(queries, keys, values, "bottom_right", scale, window, _of(alibi_slopes, row))

    return packed((sequence(*item) for item in sequences(batch, query, page)), query, value_cache, False)


def latent_pages(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
) -> Any:
    """Multi-head latent attention as SDPA with one KV head: key [latent, rotated], value [latent]."""
    query = torch.cat((q_nope, q_pe), dim=-1)
    caches = (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2))
    if _decodes(batch):
        latent, rotated = (_padded(cache, batch, "NHD") for cache in caches)
        return _decoded(query, torch.cat((latent, rotated), dim=-1), latent, batch, scale)

    def sequence(row: int, queries: Tensor, own: Tensor, length: int) -> Tensor:
        latent, rotated = (gather(cache, own, length) for cache in caches)
        return _sequence(queries, torch.cat((latent, rotated), dim=-1), latent, "bottom_right", scale, None, None)

    return packed((sequence(*item) for item in sequences(batch, query, ckv_cache.shape[1])), query, ckv_cache, False)


def _sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    slopes: Tensor | None,
) -> Tensor:
    if key.shape[2] == 0:
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    return attention(query, key, value, None, 0.0, is_causal, scale, window, None, slopes, False)


def _of(slopes: Tensor | None, row: int) -> Tensor | None:
    return slopes[row : row + 1] if slopes is not None and slopes.dim() == 2 else slopes


def _decodes(batch: PagedBatch) -> bool:
    """Whether every sequence has one new token and some context."""
    return not batch.capture and set(batch.query_lens_host) == {1} and min(batch.context_lens_host) > 0


def _padded(cache: Tensor, batch: PagedBatch, layout: str) -> Tensor:
    """The cached tokens of every sequence, [B, Hkv, longest, D]; behind the end of one stands what its table names."""
    page = cache.shape[1] if layout == "NHD" else cache.shape[2]
    tables = batch.block_tables[:, : -(-batch.max_context_len // page)]
    found = torch.index_select(cache, 0, tables.flatten().clamp(0, cache.shape[0] - 1))
    found = found.reshape(*tables.shape, *cache.shape[1:])
    if layout == "HND":
        found = found.transpose(2, 3)
    return found.flatten(1, 2)[:, : batch.max_context_len].transpose(1, 2)


def _decoded(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scale: float | None) -> Tensor:
    mask = None
    if min(batch.context_lens_host) < batch.max_context_len:
        mask = torch.arange(keys.shape[2], device=query.device) < batch.context_lens[:, None, None, None]
        # Behind the end of a sequence may stand anything, NaN too, and 0 times NaN is NaN.
        values = torch.where(mask.transpose(2, 3), values, 0.0)
    return attention(query.unsqueeze(2), keys, values, mask, 0.0, False, scale, None, None, None, False).squeeze(2)
