"""Packed sequences and paged caches on torch's attention kernels.

On a CPU one call per sequence, whose pages are gathered first. On CUDA one launch of the FlashAttention-2 inside torch
for the whole batch, through `torch.ops.aten`, since the packed form has no binding of its own: it aligns causal and
window to the bottom right and writes +inf as the log-sum-exp of a row that attends nothing, where ours is -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import sub
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.backends.reference.varlen import each_paged, heads_first, slopes_of
from layerzero.backends.sdpa.kernels import flash_cpu
from layerzero.model.attention import alibi_bias, band, no_keys, offsets, packed, upright
from layerzero.model.kv_cache import PagedBatch


def each_cpu(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rest: Any) -> Any:
    """One call of the blocked CPU kernel per sequence; neighbours of equal lengths share a call."""
    _, _, is_causal, scale, window, _, alibi_slopes, return_lse = rest
    ends_q = cu_seqlens_q.tolist()
    ends_k = ends_q if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.tolist()

    def results() -> Iterator[Any]:
        lengths = zip(map(sub, ends_q[1:], ends_q), map(sub, ends_k[1:], ends_k), strict=True)
        row = 0
        for (rows, _), alike in groupby(lengths):
            count = len([*alike])
            stop = row + count
            if rows:
                q = heads_first(query, ends_q[row], ends_q[stop], count)
                k, v = (heads_first(item, ends_k[row], ends_k[stop], count) for item in (key, value))
                slopes = slopes_of(alibi_slopes, row, count)
                yield attend_cpu(q, k, v, is_causal, scale, window, slopes, return_lse)
            row = stop

    return packed(results(), query, value, return_lse)


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
        return no_keys(query, value, return_lse)
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


class _Prepared:
    """What adapters found out about the pages of a batch, for the layers that follow."""

    __slots__ = ("found", "version")

    def __init__(self, found: Any, version: int | None) -> None:
        self.found, self.version = found, version

    def replan(self, batch: PagedBatch) -> None:
        self.version = -1  # of no tensor: it is made again


def prepared(batch: PagedBatch, make: Callable[..., Any], *sizes: int) -> Any:
    """`make(batch, *sizes)`, made once for a batch, and again where its tables were written to."""
    tables = batch.block_tables
    stream = torch._C._cuda_getCurrentRawStream(tables.get_device()) if tables.is_cuda else 0
    key = (make, sizes, stream, torch.is_inference_mode_enabled())
    version = None if tables.is_inference() else tables._version
    plan = batch.plans.get(key)
    if not isinstance(plan, _Prepared) or plan.version != version:
        plan = batch.plans[key] = _Prepared(make(batch, *sizes), version)
    return plan.found


def gather_cpu(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *rest: Any) -> Any:
    """The blocked CPU kernel, one call per sequence; pages that a window hides are not gathered."""
    scale, window, _, alibi_slopes, return_lse, layout = rest

    def attend(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Any:
        return attend_cpu(queries, keys, values, "bottom_right", scale, window, slopes, return_lse)

    left = -1 if window is None else window[0]
    return each_paged(attend, query, (key_cache, value_cache), batch, layout, alibi_slopes, return_lse, left)


def varlen_flash(
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
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    """FlashAttention-2 over packed sequences; no value is read by the host."""
    if max_seqlen_k == 0:  # no sequence has a key
        return no_keys(query, value, return_lse)
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    left, right = (-1, -1) if window is None else window
    found = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        bool(is_causal),
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0 if is_causal else right,
    )
    if not return_lse:
        return found[0]
    lse = found[1].transpose(0, 1)  # [Hq, Tq]
    return found[0], lse.masked_fill(lse == torch.inf, -torch.inf)


def paged_flash(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *rest: Any) -> Any:
    """Gather the tokens of all sequences into one packed buffer, then FlashAttention-2 over it."""
    scale, window, _, _, return_lse, layout = rest
    page = key_cache.shape[1] if layout == "NHD" else key_cache.shape[2]
    cu_q, cu_k, pages, slot = prepared(batch, _places, page)
    keys, values = (
        cache[pages, slot] if layout == "NHD" else cache[pages, :, slot] for cache in (key_cache, value_cache)
    )
    longest = (batch.max_query_len, batch.max_context_len)
    return varlen_flash(
        query, keys, values, cu_q, cu_k, *longest, "bottom_right", scale, window, None, None, return_lse
    )


def _places(batch: PagedBatch, page: int) -> tuple[Tensor, ...]:
    """Where packed queries and tokens begin, and for each token its page and its slot there."""
    device, contexts = batch.block_tables.device, batch.context_lens_host
    cu_q, cu_k = (item.to(device, non_blocking=True) for item in offsets(batch.query_lens_host, contexts))
    rows = torch.arange(len(contexts), device=device)
    row = torch.repeat_interleave(rows, cu_k.diff(), output_size=sum(contexts))
    place = torch.arange(row.shape[0], device=device) - cu_k[row]
    return cu_q, cu_k, batch.block_tables[row, place // page], place % page
