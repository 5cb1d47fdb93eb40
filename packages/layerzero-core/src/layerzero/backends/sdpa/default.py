"""What a torch user writes: `F.scaled_dot_product_attention`, which chooses among torch's own kernels.

For the calls that no single one of those kernels takes: other dtypes, an alignment, a window or ALiBi as a mask. Packed
sequences are attended one by one, and the pages of a cache are gathered first.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.varlen import all_pages, each_packed, each_paged, spans_of
from layerzero.backends.sdpa.kernels import group_attention
from layerzero.backends.sdpa.varlen import mask_of, prepared
from layerzero.model.attention import packed, upright
from layerzero.model.grouped import GroupedBatch
from layerzero.model.kv_cache import PagedBatch


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
    causal, folded = bool(is_causal), window is not None or alibi_slopes is not None
    if causal and (folded or attn_mask is not None or (is_causal is not True and query.shape[2] != key.shape[2])):
        causal, folded = False, True
    if folded:
        bias = mask_of(query.shape[2], key.shape[2], is_causal, window, alibi_slopes, query)
        attn_mask = _joined(attn_mask, bias, query.dtype)
    elif attn_mask is not None and attn_mask.dtype is not torch.bool:
        attn_mask = attn_mask.to(query.dtype)
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


def varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any) -> Any:
    """SDPA for one packed sequence after another; the host reads where they begin, unless all are equally long."""
    longest_q, longest_k, is_causal, scale, window, _, slopes, _ = rest
    attend, count = functools.partial(_sequence, is_causal, scale, window), cu_seqlens_q.shape[0] - 1
    if count and longest_q and longest_k and (len(query), len(key)) == (count * longest_q, count * longest_k):
        q, k, v = (item.view(count, -1, *item.shape[1:]).transpose(1, 2) for item in (query, key, value))
        return packed((attend(q, k, v, slopes),), query, value, False)
    return each_packed(attend, query, key, value, spans_of(cu_seqlens_q, cu_seqlens_k), slopes, False)


def grouped(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, return_lse: bool
) -> Any:
    """SDPA for each group of queries in each sequence."""
    attend = functools.partial(_sequence, "bottom_right" if causal else False, scale, None)
    return each_packed(attend, query, key, value, batch.spans(), None, False)


def pages(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *rest: Any) -> Any:
    """Gather the pages, then SDPA: over the whole batch where every sequence decodes one token, else one by one."""
    scale, window, _, slopes, _, layout = rest
    plan = _decoding(batch, key_cache, layout) if window is None and slopes is None else None
    if plan is not None:
        keys, values = (plan.gather(cache, layout) for cache in (key_cache, value_cache))
        return plan.attend(query, keys, values, scale)
    attend = functools.partial(_sequence, "bottom_right", scale, window)
    return each_paged(attend, query, (key_cache, value_cache), batch, layout, slopes)


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
    caches = (kpe_cache.unsqueeze(2), ckv_cache.unsqueeze(2))
    plan = _decoding(batch, ckv_cache, "NHD")
    if plan is not None:
        rotated, latent = (plan.gather(cache, "NHD") for cache in caches)
        return plan.attend(query, torch.cat((latent, rotated), dim=-1), latent, scale)

    def attend(queries: Tensor, rotated: Tensor, latent: Tensor, _: Tensor | None) -> Tensor:
        return _sequence("bottom_right", scale, None, queries, torch.cat((latent, rotated), dim=-1), latent, None)

    return each_paged(attend, query, caches, batch)


def _sequence(
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
) -> Tensor:
    if key.shape[2] == 0:
        return query.new_zeros((*query.shape[:3], value.shape[3]))
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and query.is_cuda and query.dtype is torch.float32 and query.shape[2] <= key.shape[2]:
        # torch's one fused kernel for float32 knows no groups of heads
        key, value = (item.repeat_interleave(heads // kv_heads, dim=1) for item in (key, value))
    return attention(query, key, value, None, 0.0, is_causal, scale, window, None, slopes, False)


class _Decode(NamedTuple):
    """A batch in which every sequence has one new token: its pages, the longest context, and which slots are in use."""

    pages: Tensor
    longest: int
    used: Tensor | None

    def gather(self, cache: Tensor, layout: str) -> Tensor:
        """The cached tokens of every sequence, [B, Hkv, longest, D]; behind the end of one stands anything."""
        return all_pages(cache, self.pages, layout)[:, :, : self.longest]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Attention of [B, H, D] over gathered tokens."""
        if self.used is not None:  # NaN too may stand behind an end: 0 times NaN is NaN, and so is NaN minus infinity
            keys, values = (torch.where(self.used.transpose(2, 3), item, 0.0) for item in (keys, values))
        if keys.shape[1] != query.shape[1] and query.dtype in (torch.float32, torch.float64):
            return group_attention(query.unsqueeze(2), keys, values, self.used, scale).squeeze(2)
        rest = (self.used, 0.0, False, scale, None, None, None, False)
        return attention(query.unsqueeze(2), keys, values, *rest).squeeze(2)


def _decoding(batch: PagedBatch, cache: Tensor, layout: str) -> _Decode | None:
    """The plan of a batch in which every sequence has one new token and some context; None for others."""
    if batch.capture or not batch.is_decode or not batch.batch_size:
        return None
    found: _Decode | None = prepared(batch, _decode, cache.shape[1 if layout == "NHD" else 2], cache.shape[0])
    return found


def _decode(batch: PagedBatch, page: int, blocks: int) -> _Decode | None:
    shortest, longest = min(batch.context_lens_host), batch.max_context_len
    if not shortest:
        return None
    pages = batch.block_tables[:, : -(-longest // page)].clamp(0, blocks - 1)
    if shortest == longest:
        return _Decode(pages, longest, None)
    slots = torch.arange(longest, device=pages.device)
    return _Decode(pages, longest, slots < batch.context_lens[:, None, None, None])
