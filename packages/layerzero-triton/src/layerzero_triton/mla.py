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
from layerzero_triton.kernels.launch import Launcher, Plan, remember, sm_count
from layerzero_triton.paged import attend, joined

_latent = Launcher(device.latent)
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
    out = torch.empty((count, heads, dim), dtype=q_nope.dtype, device=q_nope.device)
    lse = torch.empty((count, heads), dtype=torch.float32, device=q_nope.device) if return_lse else None
    if not count:
        return out if lse is None else (out, lse)
    size = dim * q_nope.element_size()
    chosen = config or _config(count, heads, batch.max_context_len, size, sm_count(q_nope.device))
    tables, lengths = batch.block_tables, batch.context_lens.contiguous()
    tables = tables if tables.stride(1) == 1 else tables.contiguous()
    given = (q_nope, q_pe, ckv_cache, kpe_cache, tables, lengths)
    key = (
        *((item.shape, item.stride(), item.dtype) for item in given[:4]), q_nope.get_device(), tables.stride(0),
        tables.dtype, lengths.dtype, chosen, scale, return_lse,
    )  # fmt: skip
    plans = _plans.get(key)
    if plans is None:
        plans = remember(_plans, key, _planned(given, scale, return_lse, chosen))
    attend(_latent, plans, given, out, lse)
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
            unit,
        ),
        chosen.warps,
        chosen.stages,
    )  # fmt: skip
    return first, joined(q_nope.shape, splits, return_lse)
