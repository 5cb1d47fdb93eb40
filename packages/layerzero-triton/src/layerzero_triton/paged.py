"""Decode attention over a paged KV cache. Canonical arguments of `paged_attention`, one query token a sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.kv_cache import PagedBatch
from layerzero_triton.config import PagedConfig, next_power, paged_config, unit_of
from layerzero_triton.kernels import paged as device
from layerzero_triton.kernels.launch import Launcher, collecting, prepare, sm_count

__all__ = ["paged_attention"]

_split = Launcher(device.split)
_combine = Launcher(device.combine)
_known: set[Any] = set()


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
    config: PagedConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one new token a sequence over its pages; `config` is for measuring.

    How the context is split is fixed by the batch as it was planned, while the lengths are read on the device: a
    captured graph stays right when they grow.
    """
    if not batch.is_decode:
        raise InvalidInputError(
            code="FEATURE_UNSUPPORTED", value=f"{batch.max_query_len} query tokens", limit="1 (decode)"
        )
    count, heads, dim = query.shape
    kv_heads = key_cache.shape[2 if layout == "NHD" else 1]
    out = torch.empty((count, heads, dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((count, heads), dtype=torch.float32, device=query.device) if return_lse else None
    if count and heads:
        chosen = config or paged_config(
            count,
            kv_heads,
            heads // kv_heads,
            batch.max_context_len,
            dim * query.element_size(),
            sm_count(query.device),
        )
        left = -1 if window is None else window[0]
        factor = 1.0 / math.sqrt(dim) if scale is None else scale
        rest = (query, key_cache, value_cache, batch, factor, left, softcap, alibi_slopes, out, lse, layout)
        if config is None:
            _prepared(chosen, rest)
        _attend(*rest, chosen)
    return out if lse is None else (out, lse)


def _prepared(chosen: PagedConfig, rest: tuple[Any, ...]) -> None:
    """Compile what other lengths and batch sizes of the same model need: one piece, a few, and many."""
    query, key_cache, _, batch, _, left, softcap, slopes, _, lse, layout = rest
    key = (
        query.dtype, query.shape[1:], query.get_device(), key_cache.shape[1:], key_cache.dtype, layout, left >= 0,
        bool(softcap), slopes is None, lse is None, batch.block_tables.dtype, unit_of(*key_cache.stride()[:3]),
    )  # fmt: skip
    if key in _known:
        return
    _known.add(key)
    with collecting() as launches:
        for splits in (1, 2, 64):
            _attend(*rest, replace(chosen, splits=splits))
    prepare(launches, query.device)


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float, left: int,
    softcap: float | None, slopes: Tensor | None, out: Tensor, lse: Tensor | None, layout: str, chosen: PagedConfig,
) -> None:  # fmt: skip
    slot_axis, head_axis = (1, 2) if layout == "NHD" else (2, 1)
    count, heads, dim = query.shape
    kv_heads = key_cache.shape[head_axis]
    group = heads // kv_heads
    splits = chosen.splits
    parts, sums = out, lse
    if splits > 1:
        room = torch.empty(count * heads * splits * (dim + 1), dtype=torch.float32, device=query.device)
        parts, sums = room[: count * heads * splits * dim], room[count * heads * splits * dim :]
    tables = batch.block_tables if batch.block_tables.stride(1) == 1 else batch.block_tables.contiguous()
    lengths = batch.context_lens if batch.context_lens.stride(0) == 1 else batch.context_lens.contiguous()
    slope_step = 0
    if slopes is not None:
        slopes = slopes.contiguous()
        slope_step = slopes.stride(0) if slopes.ndim == 2 else 0
    sk, sv, sq = key_cache.stride(), value_cache.stride(), query.stride()
    steps = (
        sq[0], sq[1], sk[0], sk[slot_axis], sk[head_axis], sv[0], sv[slot_axis], sv[head_axis],
    )  # fmt: skip
    unit = unit_of(*steps)
    tiles = -(-group // chosen.block_m)
    block_d = next_power(max(16, dim))
    _split(
        (kv_heads * tiles, splits, count),
        (query, key_cache, value_cache, tables, lengths, slopes, parts, sums),
        (
            group, heads, splits, max(left, 0), scale, softcap or 1.0, *(step // unit for step in steps),
            tables.stride(0), slope_step,
        ),
        (
            dim, block_d, key_cache.shape[slot_axis], chosen.block_m, chosen.block_n, left >= 0, bool(softcap),
            slopes is not None, sums is not None, unit, query.dtype is torch.float32, tiles,
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    if splits > 1:
        _combine(
            (count * heads, 1, 1),
            (parts, sums, out, lse),
            (splits,),
            (dim, block_d, 16 if splits <= 16 else 64, lse is not None),
            4,
        )
