"""Attention over a paged KV cache: gather each sequence's pages, then plain attention.

The cache of multi-head latent attention (DeepSeek) holds for each token one latent vector, shared by all heads, and one
rotated key. With the up-projections absorbed into the query and the output, the latent vector is key and value at once,
and this is attention with a single KV head: key [latent, rotated], value [latent].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.reference.varlen import slopes_of
from layerzero.errors import invalid
from layerzero.model.attention import Attended, packed
from layerzero.model.kv_cache import PagedBatch


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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Attended:
    """Causal (bottom-right) attention of packed queries [total_q, Hq, D] over the pages of their sequences.

    The caches are [blocks, page, Hkv, D] (NHD) or [blocks, Hkv, page, D] (HND). A sequence with no context gives
    zeros. The log-sum-exp, when asked for, is [total_q, Hq]. Lengths are read from the host side of `batch`, so
    nothing waits for the device; of a batch made for capture they are read where they are, on the device.
    """
    page_size = key_cache.shape[1] if layout == "NHD" else key_cache.shape[2]
    _check(query, batch, page_size)
    if batch.capture:
        options = (scale, window, softcap, alibi_slopes, return_lse, layout, sinks, is_causal, k_scale, v_scale)
        return _on_device(query, key_cache, value_cache, batch, *options)
    causal = "bottom_right" if is_causal else False

    def attend(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Attended:
        keys, values = scaled(keys, k_scale, queries), scaled(values, v_scale, queries)
        rest = (window, softcap, slopes, return_lse, sinks)
        return attention(queries, keys, values, None, 0.0, causal, scale, *rest)

    return one_by_one(attend, query, (key_cache, value_cache), batch, layout, alibi_slopes, return_lse)


def scaled(pages: Tensor, scale: float | Tensor | None, query: Tensor) -> Tensor:
    """Keys or values [B, Hkv, S, D] times the scale of their cache, which is one number or one for each head."""
    if scale is None:
        return pages
    factor = scale.reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
    return pages.to(compute_dtype(query, pages)) * factor


def one_by_one(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Attended],
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: PagedBatch,
    layout: str = "NHD",
    slopes: Tensor | None = None,
    return_lse: bool = False,
    left: int = -1,
) -> Attended:
    """The results of `attend` on each sequence that has queries and its tokens of both caches, packed.

    Pages whose keys all lie more than `left` before the first query are not gathered.
    """
    page = caches[0].shape[1] if layout == "NHD" else caches[0].shape[2]

    def sequence(row: int, queries: Tensor, pages: Tensor, length: int) -> Attended:
        hidden = 0 if left < 0 else max(0, length - queries.shape[2] - left) // page
        first, second = (_gather(cache, pages[hidden:], length - hidden * page, layout) for cache in caches)
        return attend(queries, first, second, slopes_of(slopes, row))

    return packed((sequence(*item) for item in _sequences(batch, query, page)), query, caches[1], return_lse)


def _sequences(batch: PagedBatch, query: Tensor, page_size: int) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """Each sequence with queries: its row, its queries [1, Hq, S, D], its pages, and how many tokens they hold."""
    start = 0
    for row, (length, count) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        if count:
            pages = batch.block_tables[row, : -(-length // page_size)]
            yield row, query[start : start + count].transpose(0, 1).unsqueeze(0), pages, length
            start += count


def _gather(cache: Tensor, pages: Tensor, context_len: int, layout: str = "NHD") -> Tensor:
    """The first `context_len` cached tokens of one sequence as [1, Hkv, context_len, D]."""
    # index_select, unlike cache[pages], refuses a negative page number instead of wrapping it to another sequence.
    blocks = torch.index_select(cache, 0, pages)
    if layout == "HND":
        return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len].unsqueeze(0)
    return blocks.flatten(0, 1)[:context_len].transpose(0, 1).unsqueeze(0)


def _on_device(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *options: Any) -> Attended:
    """The same with the lengths and pages that the batch's tensors hold when it runs, for a batch made for capture.

    A graph keeps the numbers of the host as they were when it was captured, while `batch.update` changes the tensors.
    So every token looks at all pages of its row, behind a mask; what the table holds beyond a context is ignored.
    """
    scale, window, softcap, alibi_slopes, return_lse, layout, sinks, is_causal, k_scale, v_scale = options
    tokens = torch.arange(query.shape[0], device=query.device)
    if batch.query_lens is None:
        rows, behind = tokens, torch.zeros_like(tokens)
    else:
        ends = batch.query_lens.to(torch.int64).cumsum(0)
        rows = torch.searchsorted(ends, tokens, right=True)
        behind = ends[rows] - 1 - tokens
    position = (batch.context_lens.to(torch.int64)[rows] - 1 - behind).unsqueeze(-1)
    pages = batch.block_tables.to(torch.int64)[rows].clamp(0, key_cache.shape[0] - 1)
    keys, values = (all_pages(cache, pages, layout) for cache in (key_cache, value_cache))
    slot = torch.arange(keys.shape[2], device=query.device)
    last = position if is_causal else position + behind.unsqueeze(-1)  # the newest token of the sequence
    allowed = slot <= last
    if window is not None and window[0] >= 0:
        allowed &= slot >= position - window[0]
    if window is not None and window[1] >= 0:
        allowed &= slot <= position + window[1]
    keys, values = scaled(keys, k_scale, query), scaled(values, v_scale, query)
    mask = allowed[:, None, None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes[rows] if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(0)
        bias = -slopes.unsqueeze(-1) * (position - slot).abs().unsqueeze(1)
        mask = bias.unsqueeze(2).masked_fill(~mask, -torch.inf)
    result = attention(
        query.unsqueeze(2), keys, values, mask, 0.0, False, scale, None, softcap, None, return_lse, sinks
    )
    if isinstance(result, tuple):
        return result[0].squeeze(2), result[1].squeeze(2)
    return result.squeeze(2)


def all_pages(cache: Tensor, pages: Tensor, layout: str) -> Tensor:
    """The pages of each token's row, one after another: [tokens, Hkv, blocks * page, D]."""
    found = torch.index_select(cache, 0, pages.flatten())
    if layout == "HND":
        found = found.transpose(1, 2)
    return found.reshape(pages.shape[0], pages.shape[1] * found.shape[1], *found.shape[2:]).transpose(1, 2)


def _check(query: Tensor, batch: PagedBatch, page_size: int) -> None:
    capacity = batch.block_tables.shape[1] * page_size
    if batch.max_context_len > capacity:
        found = f"of {batch.block_tables.shape[1]} pages of {page_size}"
        raise invalid("BLOCK_TABLE_INVALID", found, f"a context of {batch.max_context_len} tokens")
    if query.shape[0] != batch.total_q:
        raise invalid("SHAPE_INVALID", tuple(query.shape), f"{batch.total_q} packed query tokens")


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
