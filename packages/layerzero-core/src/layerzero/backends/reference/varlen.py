"""Attention over packed sequences: each one alone, then put together; or all tokens at once behind a mask.

Sequence s of the queries is rows cu_seqlens_q[s] to cu_seqlens_q[s + 1], and likewise for keys and values. Positions
count from the start of each sequence; alignment is that of plain attention, sequence by sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.precision import compute_dtype
from layerzero.model.attention import Attended, inside, packed
from layerzero.model.grouped import GroupedBatch

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

    return one_by_one(attend, query, key, value, spans_of(cu_seqlens_q, cu_seqlens_k), alibi_slopes, return_lse)


def one_by_one(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Attended],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Iterable[Spans],
    slopes: Tensor | None,
    return_lse: bool,
) -> Attended:
    """The results of `attend` on each sequence that has queries, packed."""

    def sequence(row: int, queries: tuple[int, int], keys: tuple[int, int]) -> Attended:
        q, k, v = (_heads_first(item, *span) for item, span in ((query, queries), (key, keys), (value, keys)))
        return attend(q, k, v, slopes_of(slopes, row))

    found = (sequence(row, *both) for row, both in enumerate(spans) if both[0][0] < both[0][1])
    return packed(found, query, value, return_lse)


def spans_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterable[Spans]:
    """Where the queries and the keys of each sequence begin and end; the host reads it."""
    ends = cu_seqlens_q.tolist()
    others = ends if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.tolist()
    return zip(itertools.pairwise(ends), itertools.pairwise(others), strict=True)


def _heads_first(tokens: Tensor, start: int, end: int) -> Tensor:
    """Some rows of [tokens, H, D] as [1, H, rows, D]."""
    part = tokens if end - start == tokens.shape[0] else tokens[start:end]
    return part.transpose(0, 1).unsqueeze(0)


def slopes_of(slopes: Tensor | None, row: int, count: int = 1) -> Tensor | None:
    """The slopes of `count` sequences from `row` on, where each has its own."""
    return slopes[row : row + count] if slopes is not None and slopes.dim() == 2 else slopes


def _readable(*offsets: Tensor) -> bool:
    if any(torch._C._functorch.is_functorch_wrapped_tensor(item) for item in offsets):
        return False
    return not (offsets[0].is_cuda and torch.cuda.is_current_stream_capturing())


def varlen_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Attended:
    """The same as one attention over all tokens with a block-diagonal mask: no value is read by the host.

    Right for any offsets, but its memory grows with the square of the tokens.
    """
    seq_q, own_q = _places(cu_seqlens_q, query.shape[0])
    seq_k, own_k = _places(cu_seqlens_k, key.shape[0])
    lengths = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    ends = own_q + lengths[seq_q]  # positions aligned to the end of the keys
    starts = own_q if is_causal is True else ends
    mask = keep = (seq_q.unsqueeze(-1) == seq_k) & inside(own_k - starts.unsqueeze(-1), is_causal, window)
    if alibi_slopes is not None:
        slopes = alibi_slopes[seq_q].t() if alibi_slopes.dim() == 2 else alibi_slopes.unsqueeze(-1)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        bias = -slopes.to(wide).unsqueeze(-1) * (own_k - ends.unsqueeze(-1)).abs()
        mask = bias.masked_fill(~keep, -torch.inf).unsqueeze(0)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    found = attention(q, k, v, mask, 0.0, False, scale, None, softcap, None, return_lse, sinks)
    return packed((found,), query, value, return_lse)


def _places(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each token its sequence, and its position there."""
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

    return one_by_one(attend, query, keys, values, batch.spans(), None, return_lse)
