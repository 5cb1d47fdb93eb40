"""Packed sequences on torch's attention kernels, one call per sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.attention import alibi_bias, band
from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.reference.varlen import slopes_of
from layerzero.backends.sdpa.kernels import flash_cpu
from layerzero.model.attention import packed


def each_cpu(
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
    """One call of the blocked CPU kernel per sequence; neighbours of equal lengths share a call."""
    spans = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)

    def results() -> Iterator[Any]:
        row = 0
        for (rows, cols), equal in itertools.groupby(spans, _lengths):
            group = list(equal)
            count, first, start = len(group), group[0][0][0], group[0][1][0]
            row += count
            if rows == 0:
                continue
            parts = (
                _heads_first(query[first : first + count * rows], count),
                _heads_first(key[start : start + count * cols], count),
                _heads_first(value[start : start + count * cols], count),
            )
            slopes = slopes_of(alibi_slopes, row - count, count)
            yield attend_cpu(*parts, is_causal, scale, window, slopes, return_lse)

    return packed(results(), query, value, return_lse)


def _lengths(span: tuple[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
    (first, last), (start, stop) = span
    return last - first, stop - start


def _heads_first(packed: Tensor, count: int) -> Tensor:
    """[count * S, H, D] as [count, H, S, D], a view."""
    return packed.view(count, packed.shape[0] // count, *packed.shape[1:]).transpose(1, 2)


def attend_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
) -> Any:
    """Attention of [n, Hq, rows, D] over [n, Hkv, cols, D]; a row without any key gives zeros.

    16-bit inputs are computed in float32: the blocked kernel is up to 100 times slower in a 16-bit type that the CPU
    has no matrix instructions for, and widening one sequence costs little.
    """
    if query.dtype.itemsize < 4:
        found = attend_cpu(
            query.float(), key.float(), value.float(), is_causal, scale, window, alibi_slopes, return_lse
        )
        return (found[0].to(query.dtype), found[1]) if return_lse else found.to(query.dtype)
    count, heads, rows, _ = query.shape
    kv_heads, cols = key.shape[1:3]
    if cols == 0:
        out = query.new_zeros((count, heads, rows, value.shape[3]))
        return (out, query.new_full((count, heads, rows), -torch.inf, dtype=torch.float32)) if return_lse else out
    if rows > 1 or is_causal is True:
        square = bool(is_causal) and rows == cols and window is None and alibi_slopes is None
        mask = None if square else mask_of(rows, cols, is_causal, window, alibi_slopes, query)
        return flash_cpu(query, key, value, mask, 0.0, square, scale, None, None, None, return_lse)
    # One row at the end: a window is a slice of the keys, and the heads of a GQA group are rows that share them.
    left = -1 if window is None else window[0]
    if 0 <= left < cols - 1:
        key, value, cols = key[:, :, -left - 1 :], value[:, :, -left - 1 :], left + 1
    bias = mask_of(1, cols, False, None, alibi_slopes, query)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], kv_heads, heads // kv_heads, cols)
    grouped = query.reshape(count, kv_heads, heads // kv_heads, query.shape[3])
    found = flash_cpu(grouped, key, value, bias, 0.0, False, scale, None, None, None, return_lse)
    out, lse = found if return_lse else (found, None)
    out = out.reshape(count, heads, 1, value.shape[3])
    return out if lse is None else (out, lse.reshape(count, heads, 1))


def mask_of(
    rows: int,
    cols: int,
    is_causal: bool | str,
    window: tuple[int, int] | None,
    slopes: Tensor | None,
    like: Tensor,
) -> Tensor | None:
    """Causal triangle, window and ALiBi as one additive mask, or None. In float32: large biases need its digits."""
    wide = compute_dtype(like)
    bias = None if slopes is None else alibi_bias(slopes.to(wide), rows, cols)
    seen = band(is_causal, window, rows, cols, like.device)
    if seen is None:
        return bias
    full = torch.zeros((), dtype=wide, device=like.device) if bias is None else bias
    return torch.where(seen, full, -torch.inf)
