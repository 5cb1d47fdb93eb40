"""Decode by latent attention over pages. Canonical arguments of `mla_paged_attention`, one query token a sequence."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.kv_cache import PagedBatch
from layerzero_triton.config import PagedConfig, latent_config, next_power, unit_of
from layerzero_triton.kernels import mla as device
from layerzero_triton.kernels import paged as joining
from layerzero_triton.kernels.launch import Launcher, Plan, remember, sm_count

_latent = Launcher(device.latent)
_combine = Launcher(joining.combine)
_config = functools.lru_cache(maxsize=4096)(latent_config)
_plans: dict[Any, tuple[Plan, Plan | None]] = {}


def mla_paged_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    return_lse: bool,
    *,
    config: PagedConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention of one new token a sequence over its pages; `config` is for measuring.

    How the context is split is fixed by the batch as it was planned, while the lengths are read on the device: a
    captured graph stays right when they grow.
    """
    if not batch.is_decode:
        raise invalid("FEATURE_UNSUPPORTED", f"{batch.max_query_len} query tokens", "1 (decode)")
    count, heads, dim = q_nope.shape
    place = q_nope.device
    out = torch.empty((count, heads, dim), dtype=q_nope.dtype, device=place)
    lse = torch.empty((count, heads), dtype=torch.float32, device=place) if return_lse else None
    if not count:
        return out if lse is None else (out, lse)
    size = dim * q_nope.element_size()
    chosen = config or _config(count, heads, batch.max_context_len, size, sm_count(place))
    tables, lengths = batch.block_tables, batch.context_lens
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    if lengths.stride(0) != 1:
        lengths = lengths.contiguous()
    given = (q_nope, q_pe, ckv_cache, kpe_cache, tables, lengths)
    key = (
        *((item.shape, item.stride(), item.dtype) for item in given[:4]), q_nope.get_device(), tables.stride(0),
        tables.dtype, lengths.dtype, chosen, scale, return_lse,
    )  # fmt: skip
    plans = _plans.get(key)
    if plans is None:
        plans = remember(_plans, key, _planned(given, scale, return_lse, chosen))
    first, join = plans
    if join is None:
        _latent.go(first, (*given, out, lse))
        return out if lse is None else (out, lse)
    parts = torch.empty((count * heads * chosen.splits, dim), dtype=torch.float32, device=place)
    sums = torch.empty(count * heads * chosen.splits, dtype=torch.float32, device=place)
    _latent.go(first, (*given, parts, sums))
    _combine.go(join, (parts, sums, out, lse))
    return out if lse is None else (out, lse)


def _planned(
    given: tuple[Tensor, ...], scale: float, return_lse: bool, chosen: PagedConfig
) -> tuple[Plan, Plan | None]:
    q_nope, q_pe, ckv_cache, kpe_cache, tables, _ = given
    count, heads, dim = q_nope.shape
    rest, splits = q_pe.shape[2], chosen.splits
    steps = tuple(step for item in (q_nope, q_pe, ckv_cache, kpe_cache) for step in item.stride()[:2])
    unit = unit_of(*steps)
    block_d, block_r = next_power(max(16, dim)), next_power(max(16, rest))
    first = Plan(
        (-(-heads // chosen.block_m), splits, count),
        (heads, splits, scale, *(step // unit for step in steps), tables.stride(0)),
        (
            dim, block_d, rest, block_r, ckv_cache.shape[1], chosen.block_m, chosen.block_n, splits > 1 or return_lse,
            unit, q_nope.dtype is torch.float32,
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    if splits == 1:
        return first, None
    return first, Plan((count * heads, 1, 1), (splits,), (dim, block_d, 16 if splits <= 16 else 64, return_lse))
