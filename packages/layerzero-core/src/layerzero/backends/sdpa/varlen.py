"""Packed sequences on torch's attention kernels, one call per sequence."""

from __future__ import annotations

from collections.abc import Iterator
from operator import sub
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.reference.varlen import slopes_of
from layerzero.backends.sdpa.kernels import flash_cpu
from layerzero.model.attention import alibi_bias, band, packed


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
    ends_q = cu_seqlens_q.tolist()
    ends_k = ends_q if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.tolist()

    def results() -> Iterator[Any]:
        lengths = [*zip(map(sub, ends_q[1:], ends_q), map(sub, ends_k[1:], ends_k), strict=True)]
        row = 0
        while row < len(lengths):
            rows, cols = lengths[row]
            stop = row + 1
            while stop < len(lengths) and lengths[stop] == (rows, cols):
                stop += 1
            if rows:
                parts = (
                    _heads_first(query, ends_q[row], ends_q[stop], stop - row),
                    _heads_first(key, ends_k[row], ends_k[stop], stop - row),
                    _heads_first(value, ends_k[row], ends_k[stop], stop - row),
                )
                slopes = slopes_of(alibi_slopes, row, stop - row)
                yield attend_cpu(*parts, is_causal, scale, window, slopes, return_lse)
            row = stop

    return packed(results(), query, value, return_lse)


def _heads_first(packed: Tensor, first: int, last: int, count: int) -> Tensor:
    """Rows `first` to `last` of [T, H, D], `count` sequences alike, as [count, H, S, D], a view."""
    tokens, heads, dim = packed.shape
    part = packed if last - first == tokens else packed[first:last]
    return part.view(count, (last - first) // count, heads, dim).transpose(1, 2)


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
        alone = window is None and alibi_slopes is None
        square = bool(is_causal) and rows == cols and alone
        plain = square or (alone and not is_causal)
        mask = None if plain else mask_of(rows, cols, is_causal, window, alibi_slopes, query)
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
