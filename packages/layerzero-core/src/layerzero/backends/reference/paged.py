"""Attention over a paged KV cache: gather each sequence's pages, then plain attention."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.attention import attention
from layerzero.errors import InvalidInputError
from layerzero.model.kv_cache import PagedBatch
from layerzero.reasons import ReasonCode

__all__ = ["paged_attention"]


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal (bottom-right) attention of packed queries [total_q, Hq, D] over the pages of their sequences.

    The caches are [blocks, page, Hkv, D] (NHD) or [blocks, Hkv, page, D] (HND). A sequence with no context gives
    zeros. The log-sum-exp, when asked for, is [total_q, Hq]. Lengths are read from the host side of `batch`, so
    nothing waits for the device.
    """
    page_size = key_cache.shape[1] if layout == "NHD" else key_cache.shape[2]
    _check(query, batch, page_size)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    start = 0
    for row, (context_len, query_len) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        if query_len == 0:
            continue
        pages = batch.block_tables[row, : -(-context_len // page_size)]
        keys = _gather(key_cache, pages, context_len, layout)
        values = _gather(value_cache, pages, context_len, layout)
        queries = query[start : start + query_len].transpose(0, 1).unsqueeze(0)
        slopes = alibi_slopes[row] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        result = attention(queries, keys, values, None, 0.0, "bottom_right", scale, window, softcap, slopes, return_lse)
        out, lse = result if isinstance(result, tuple) else (result, None)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0].transpose(0, 1))
        start += query_len
    packed = torch.cat(outs) if outs else query.new_zeros((0, query.shape[1], value_cache.shape[-1]))
    if not return_lse:
        return packed
    return packed, torch.cat(lses) if lses else query.new_zeros((0, query.shape[1]), dtype=torch.float32)


def _gather(cache: Tensor, pages: Tensor, context_len: int, layout: str) -> Tensor:
    """The first `context_len` cached tokens of one sequence as [1, Hkv, context_len, D]."""
    # index_select, unlike cache[pages], refuses a negative page number instead of wrapping it to another sequence.
    blocks = torch.index_select(cache, 0, pages)
    if layout == "HND":
        blocks = blocks.transpose(1, 2)
    return blocks.flatten(0, 1)[:context_len].transpose(0, 1).unsqueeze(0)


def _check(query: Tensor, batch: PagedBatch, page_size: int) -> None:
    capacity = batch.block_tables.shape[1] * page_size
    if batch.max_context_len > capacity:
        raise InvalidInputError(
            code=ReasonCode.BLOCK_TABLE_INVALID,
            value=f"of {batch.block_tables.shape[1]} pages of {page_size}",
            limit=f"a context of {batch.max_context_len} tokens",
        )
    if query.shape[0] != batch.total_q:
        raise InvalidInputError(
            code=ReasonCode.SHAPE_INVALID, value=tuple(query.shape), limit=f"{batch.total_q} packed query tokens"
        )
