"""Packed sequences and paged caches on the FlashAttention-2 inside torch: one launch for the whole batch.

Through `torch.ops.aten`, since the packed form has no binding of its own. The kernel aligns causal and window to the
bottom right and writes +inf as the log-sum-exp of a row that attends nothing, where ours is -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.backends.sdpa.paged import prepared
from layerzero.model.attention import no_keys, offsets, upright
from layerzero.model.kv_cache import PagedBatch


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


def paged_flash(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
    layout: str,
) -> Any:
    """Gather the tokens of all sequences into one packed buffer, then FlashAttention-2 over it."""
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
