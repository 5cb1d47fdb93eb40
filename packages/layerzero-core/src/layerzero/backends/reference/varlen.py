"""Attention over packed sequences: each one alone, then put together; or all tokens at once behind a mask.

Sequence s of the queries is rows cu_seqlens_q[s] to cu_seqlens_q[s + 1], and likewise for keys and values. Positions
count from the start of each sequence; alignment is that of plain attention, sequence by sequence.

Of a paged KV cache the pages of each sequence are gathered first. The cache of multi-head latent attention (DeepSeek)
holds for each token one latent vector, shared by all heads, and one rotated key. With the up-projections absorbed into
the query and the output, the latent vector is key and value at once, and this is attention with a single KV head: key
[latent, rotated], value [latent].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.precision import compute_dtype
from layerzero.errors import invalid
from layerzero.model.attention import Attended, inside, packed
from layerzero.model.grouped import GroupedBatch
from layerzero.model.kv_cache import PagedBatch

Spans = tuple[tuple[int, int], tuple[int, int]]


def varlen_attention(
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
) -> Attended:
    """Attention of packed queries [Tq, Hq, D] over packed keys [Tk, Hkv, D] and values [Tk, Hkv, Dv].

    A query whose sequence has no key gives zeros, and -inf as its log-sum-exp, which is [Tq, Hq]. Where the host
    cannot read the offsets (a captured graph, a transform) the masked form computes the same in more memory.
    """
    if not _readable(cu_seqlens_q, cu_seqlens_k):
        return varlen_masked(
            query, key, value, cu_seqlens_q, cu_seqlens_k, None, None, is_causal, scale, window, softcap, alibi_slopes,
            return_lse, sinks,
        )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Attended:
        return attention(q, k, v, None, 0.0, is_causal, scale, window, softcap, slopes, return_lse, sinks)

    return each_packed(attend, query, key, value, spans_of(cu_seqlens_q, cu_seqlens_k), alibi_slopes, return_lse)


def each_packed(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Attended],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Iterable[Spans],
    slopes: Tensor | None,
    return_lse: bool,
) -> Attended:
    """The results of `attend` on each sequence that has queries, packed."""

    def results() -> Iterator[Attended]:
        for row, (queries, keys) in enumerate(spans):
            if queries[0] < queries[1]:
                q, k, v = (heads_first(item, *span) for item, span in ((query, queries), (key, keys), (value, keys)))
                yield attend(q, k, v, slopes_of(slopes, row))

    return packed(results(), query, value, return_lse)


def spans_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterable[Spans]:
    """Where the queries and the keys of each sequence begin and end; the host reads it."""
    ends = cu_seqlens_q.tolist()
    others = ends if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.tolist()
    return zip(itertools.pairwise(ends), itertools.pairwise(others), strict=True)


def heads_first(tokens: Tensor, start: int, end: int, count: int = 1) -> Tensor:
    """Rows of [T, H, D] that hold `count` sequences of one length, as [count, H, S, D], a view."""
    part = tokens if end - start == tokens.shape[0] else tokens[start:end]
    return part.view(count, (end - start) // count, *tokens.shape[1:]).transpose(1, 2)


def slopes_of(slopes: Tensor | None, row: int, count: int = 1) -> Tensor | None:
    """The slopes of `count` sequences from `row` on, where each has its own."""
    return slopes[row : row + count] if slopes is not None and slopes.dim() == 2 else slopes


def _readable(*offsets: Tensor) -> bool:
    if any(torch._C._functorch.is_functorch_wrapped_tensor(item) for item in offsets):
        return False
    return not (offsets[0].is_cuda and torch.cuda.is_current_stream_capturing())


def varlen_masked(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any
) -> Attended:
    """The same as one attention over all tokens with a block-diagonal mask: no value is read by the host.

    Right for any offsets, but its memory grows with the square of the tokens. Tokens behind the last sequence are
    padding, as graphs of a fixed size have it: nobody sees those keys, and such queries give zeros.
    """
    _, _, is_causal, scale, window, softcap, alibi_slopes, return_lse, *sinks = rest
    seq_q, own_q = _places(cu_seqlens_q, query.shape[0])
    seq_k, own_k = _places(cu_seqlens_k, key.shape[0])
    lengths = pad(cu_seqlens_k.diff() - cu_seqlens_q.diff(), (0, 1))
    ends = own_q + lengths[seq_q]  # positions aligned to the end of the keys
    starts = own_q if is_causal is True else ends
    together = (seq_q.unsqueeze(-1) == seq_k) & (seq_k < cu_seqlens_k.shape[0] - 1)
    mask = keep = together & inside(own_k, starts.unsqueeze(-1), is_causal, window)
    if alibi_slopes is not None:
        slopes = pad(alibi_slopes, (0, 0, 0, 1))[seq_q].t() if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(-1)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        bias = -slopes.to(wide).unsqueeze(-1) * (own_k - ends.unsqueeze(-1)).abs()
        mask = bias.masked_fill(~keep, -torch.inf).unsqueeze(0)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    found = attention(q, k, v, mask, 0.0, False, scale, None, softcap, None, return_lse, *sinks)
    return packed((found,), query, value, return_lse)


def _places(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each token its sequence, and its position there; padding has the number after the last sequence."""
    index = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    return sequence, index - offsets[sequence]


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: GroupedBatch,
    causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Attended:
    """Attention of packed queries [total_q, Hq, D] over the first keys of their sequences, [total_k, Hkv, D] packed.

    Causal is bottom-right: the last query of a segment sees all keys of its group. A query without any key gives
    zeros. The log-sum-exp, when asked for, is [total_q, Hq].
    """
    dtype = compute_dtype(query, key, value)
    # Widened before they are cut into prefixes: the gradients of overlapping prefixes then add up in this precision.
    keys, values = key.to(dtype), value.to(dtype)
    alignment = "bottom_right" if causal else False

    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Attended:
        return attention(q, k, v, None, 0.0, alignment, scale, None, None, slopes, return_lse)

    return each_packed(attend, query, keys, values, batch.spans(), None, return_lse)


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
    page_size, pages = key_cache.shape[1 if layout == "NHD" else 2], batch.block_tables.shape[1]
    if batch.max_context_len > pages * page_size:
        found = f"of {pages} pages of {page_size}"
        raise invalid("BLOCK_TABLE_INVALID", found, f"a context of {batch.max_context_len} tokens")
    if query.shape[0] != batch.total_q:
        raise invalid("SHAPE_INVALID", tuple(query.shape), f"{batch.total_q} packed query tokens")
    if batch.capture:
        options = (scale, window, softcap, alibi_slopes, return_lse, layout, sinks, is_causal, k_scale, v_scale)
        return _on_device(query, key_cache, value_cache, batch, *options)
    causal = "bottom_right" if is_causal else False

    def attend(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Attended:
        keys, values = scaled(keys, k_scale, queries), scaled(values, v_scale, queries)
        rest = (window, softcap, slopes, return_lse, sinks)
        return attention(queries, keys, values, None, 0.0, causal, scale, *rest)

    return each_paged(attend, query, (key_cache, value_cache), batch, layout, alibi_slopes, return_lse)


def scaled(pages: Tensor, scale: float | Tensor | None, query: Tensor) -> Tensor:
    """Keys or values [B, Hkv, S, D] times the scale of their cache, which is one number or one for each head."""
    if scale is None:
        return pages
    factor = scale.reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
    return pages.to(compute_dtype(query, pages)) * factor


def each_paged(
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
    page = caches[0].shape[1 if layout == "NHD" else 2]

    def results() -> Iterator[Attended]:
        start = 0
        for row, (length, count) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
            if not count:
                continue
            hidden = 0 if left < 0 else max(0, length - count - left) // page
            pages = batch.block_tables[row : row + 1, hidden : -(-length // page)]
            first, second = (all_pages(cache, pages, layout)[:, :, : length - hidden * page] for cache in caches)
            queries = query[start : start + count].transpose(0, 1).unsqueeze(0)
            yield attend(queries, first, second, slopes_of(slopes, row))
            start += count

    return packed(results(), query, caches[1], return_lse)


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
    if window is not None:
        allowed &= inside(slot, position, False, window)
    keys, values = scaled(keys, k_scale, query), scaled(values, v_scale, query)
    mask = allowed[:, None, None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes[rows] if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(0)
        bias = -slopes.unsqueeze(-1) * (position - slot).abs().unsqueeze(1)
        mask = bias.unsqueeze(2).masked_fill(~mask, -torch.inf)
    found = attention(query.unsqueeze(2), keys, values, mask, 0.0, False, scale, None, softcap, None, return_lse, sinks)
    return packed((found,), query, value_cache, return_lse)


def all_pages(cache: Tensor, pages: Tensor, layout: str) -> Tensor:
    """The pages of each row, one after another: [rows, Hkv, blocks * page, D]."""
    # index_select, unlike cache[pages], refuses a negative page number instead of wrapping it to another sequence.
    found = torch.index_select(cache, 0, pages.flatten()).view(*pages.shape, *cache.shape[1:])
    return found.transpose(1, 2).flatten(2, 3) if layout == "HND" else found.flatten(1, 2).transpose(1, 2)


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

    return each_paged(attend, query, (kpe_cache.unsqueeze(2), ckv_cache.unsqueeze(2)), batch, return_lse=return_lse)
