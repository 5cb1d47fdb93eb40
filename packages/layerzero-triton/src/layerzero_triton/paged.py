"""Decode attention over a paged KV cache. Canonical arguments of `paged_attention`, one query token a sequence."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.kv_cache import PagedBatch
from layerzero_triton.config import PagedConfig, fixed_paged_config, next_power, paged_config, unit_of
from layerzero_triton.kernels import paged as device
from layerzero_triton.kernels.launch import Launcher, Plan, collecting, prepare, remember, sm_count

_split = Launcher(device.split)
_combine = Launcher(device.combine)
_config = functools.lru_cache(maxsize=4096)(paged_config)
_known: set[Any] = set()


_Plans = tuple[Plan, "Plan | None"]  # the two launches of a call, or one where the context is not split
_plans: dict[Any, _Plans] = {}


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
    *,
    config: PagedConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one new token a sequence over its pages; `config` is for measuring.

    How the context is split is fixed by the batch as it was planned, while the lengths are read on the device: a
    captured graph stays right when they grow.
    """
    if not batch.is_decode:
        raise invalid("FEATURE_UNSUPPORTED", f"{batch.max_query_len} query tokens", "1 (decode)")
    count, heads, dim = shape = query.shape
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((count, heads), dtype=torch.float32, device=query.device) if return_lse else None
    if count and heads:
        kv_heads = key_cache.shape[2 if layout == "NHD" else 1]
        sizes = (count, kv_heads, heads // kv_heads, batch.max_context_len, dim * query.element_size())
        chosen = config or _config(*sizes, sm_count(query.device))
        tables, lengths = batch.block_tables, batch.context_lens.contiguous()
        tables = tables if tables.stride(1) == 1 else tables.contiguous()
        slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        if isinstance(k_scale, (int, float)):
            scale, k_scale = k_scale * (dim**-0.5 if scale is None else scale), None
        scales = _scales(k_scale, v_scale, query.device)
        # Everything a plan is made of, and every dtype: a decode loop finds its launches ready for all its layers.
        key = (
            shape, query.stride(), query.dtype, query.get_device(), key_cache.shape, key_cache.stride(),
            key_cache.dtype, value_cache.stride(), value_cache.dtype, tables.stride(0), tables.dtype, lengths.dtype,
            None if slopes is None else (slopes.shape, slopes.dtype), chosen, scale, window, softcap, return_lse,
            layout, *(None if item is None else (item.shape, item.dtype) for item in (sinks, *scales)),
        )  # fmt: skip
        plans = _plans.get(key)
        own = None if sinks is None else sinks.contiguous()
        given = (query, key_cache, value_cache, tables, lengths, slopes, own, *scales)
        if plans is None:
            factor = 1.0 / math.sqrt(dim) if scale is None else scale
            rest = (factor, -1 if window is None else window[0], softcap, layout)
            plans = _planned(given, return_lse, rest, chosen)
            if config is None:
                _prepared(given, out, lse, rest, chosen)
            remember(_plans, key, plans)
        attend(_split, plans, given, out, lse)
    return out if lse is None else (out, lse)


def fixed(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, *rest: Any) -> Any:
    """The same with a context always cut into as many pieces: where they end follows from its own length alone."""
    kv_heads = key_cache.shape[2 if rest[5] == "NHD" else 1]
    chosen = fixed_paged_config(query.shape[1] // kv_heads, query.shape[2] * query.element_size())
    return paged_attention(query, key_cache, value_cache, batch, *rest, config=chosen)


def fixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | str,
    *rest: Any,
) -> Any:
    """Attention over [B, S, H, D]: every query is a sequence of its own, every key a page of one token.

    No query shares what another one read: made for equal bits in any batch and any pieces of a prompt, not for speed.
    """
    (count, rows, heads, dim), keys = query.shape, key.shape[1]
    scale, window, softcap, slopes, return_lse = rest
    first = 0 if is_causal is True else keys - rows
    seen = torch.arange(1, rows + 1, dtype=torch.int32, device=query.device) + first if is_causal else keys
    lengths = torch.zeros((count, rows), dtype=torch.int32, device=query.device) + seen
    lengths = lengths.clamp(0, keys).flatten()
    places = torch.arange(count * keys, dtype=torch.int32, device=query.device).view(count, 1, keys)
    tables = places.expand(count, rows, keys).reshape(count * rows, keys)
    batch = PagedBatch(tables, lengths, None, (keys,) * (count * rows), (1,) * (count * rows))
    key, value = (item.reshape(count * keys, 1, *item.shape[2:]) for item in (key, value))
    query = query.reshape(-1, heads, dim)
    found = fixed(query, key, value, batch, scale, window, softcap, slopes, return_lse, "NHD")
    out = found[0] if return_lse else found
    out = out.view(count, rows, heads, dim)
    return (out, found[1].view(count, rows, heads).transpose(1, 2)) if return_lse else out


_Given = tuple[Any, ...]  # query, caches, tables, lengths; slopes, sinks and both scales, or None
_Rest = tuple[float, int, "float | None", str]


@functools.lru_cache(maxsize=64)
def _number(value: float, place: torch.device) -> Tensor:
    return torch.full((1,), value, device=place)


def _scales(k_scale: Any, v_scale: Any, place: torch.device) -> list[Tensor | None]:
    """Both scales of the caches as tensors of as many numbers each: one, or one for each KV head."""
    found = [
        item if item is None or isinstance(item, Tensor) else _number(float(item), place) for item in (k_scale, v_scale)
    ]
    most = max((item.numel() for item in found if item is not None), default=1)
    return [None if item is None else item.reshape(-1).expand(most).contiguous() for item in found]


def _planned(given: _Given, return_lse: bool, rest: _Rest, chosen: PagedConfig) -> _Plans:
    query, key_cache, value_cache, tables, _, slopes, sinks, k_scale, v_scale = given
    scale, left, softcap, layout = rest
    slot_axis, head_axis = (1, 2) if layout == "NHD" else (2, 1)
    count, heads, dim = query.shape
    kv_heads = key_cache.shape[head_axis]
    group, splits = heads // kv_heads, chosen.splits
    sk, sv, sq = key_cache.stride(), value_cache.stride(), query.stride()
    steps = (
        sq[0], sq[1], sk[0], sk[slot_axis], sk[head_axis], sv[0], sv[slot_axis], sv[head_axis],
    )  # fmt: skip
    unit = unit_of(*steps)
    tiles = -(-group // chosen.block_m)
    block_d = next_power(max(16, dim))
    slope_step = slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0
    split = Plan(
        (kv_heads * tiles, splits, count),
        (
            group, heads, splits, max(left, 0), scale, softcap or 1.0, *(step // unit for step in steps),
            tables.stride(0), slope_step,
        ),
        (
            dim, block_d, key_cache.shape[slot_axis], chosen.block_m, chosen.block_n, left >= 0, bool(softcap),
            slopes is not None, splits > 1 or return_lse, unit, tiles,
            sinks is not None, k_scale is not None, v_scale is not None,
            int(any(item is not None and item.numel() > 1 for item in (k_scale, v_scale))),
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    return split, joined(query.shape, splits, return_lse)


def joined(shape: torch.Size, splits: int, return_lse: bool) -> Plan | None:
    """The launch that joins the splits of queries [sequences, heads, dim]; None where there is one."""
    count, heads, dim = shape
    sizes = (dim, next_power(max(16, dim)), 16 if splits <= 16 else 64, return_lse)
    return Plan((count * heads, 1, 1), (splits,), sizes) if splits > 1 else None


def _prepared(given: _Given, out: Tensor, lse: Tensor | None, rest: _Rest, chosen: PagedConfig) -> None:
    """Compile what other lengths and batch sizes of the same model need: one piece, a few, and many."""
    query, key_cache, _, tables, _, slopes, *more = given
    _, left, softcap, layout = rest
    key = (
        query.dtype, query.shape[1:], query.get_device(), key_cache.shape[1:], key_cache.dtype, layout, left >= 0,
        bool(softcap), slopes is None, lse is None, tables.dtype, unit_of(*key_cache.stride()[:3]),
        *(None if item is None else (item.dtype, item.numel() > 1) for item in more),
    )  # fmt: skip
    if key in _known:
        return
    _known.add(key)
    with collecting() as launches:
        for splits in (1, 2, 64):
            attend(_split, _planned(given, lse is not None, rest, replace(chosen, splits=splits)), given, out, lse)
    prepare(launches, query.device)


def attend(launcher: Launcher, plans: _Plans, given: _Given, out: Tensor, lse: Tensor | None) -> None:
    """Launch what was planned."""
    split, combine = plans
    if combine is None:
        launcher.go(split, (*given, out, lse))
        return
    count, heads, dim = out.shape
    sums = torch.empty(count * heads * split.grid[1], dtype=torch.float32, device=out.device)
    parts = sums.new_empty((sums.shape[0], dim))
    launcher.go(split, (*given, parts, sums))
    _combine.go(combine, (parts, sums, out, lse))
