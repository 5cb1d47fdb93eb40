"""Launches the Hopper forward: 128 rows a program, keys and values by the copy engine."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from layerzero.model.grouped import GroupedBatch
from layerzero_triton.grouped import forward as fore
from layerzero_triton.grouped import hopper
from layerzero_triton.grouped.strides import flat
from layerzero_triton.grouped.tables import Tables, forward_tables

__all__ = ["HEAD_DIMS", "HopperConfig", "forward"]

_ROWS = 128
_LOG2E = 1.4426950408889634


class HopperConfig(NamedTuple):
    """Keys in a block, blocks in flight, whether the warpgroups take turns, whether long tiles are cut.

    Turns, which keep the two warpgroups out of step, cost more on an H200 than they bring: left alone they fall out of
    step by themselves.
    """

    block_n: int
    stages: int
    turns: bool = False
    split: bool = True


HEAD_DIMS = {64: HopperConfig(128, 2), 128: HopperConfig(128, 2), 256: HopperConfig(64, 2)}


@lru_cache(maxsize=64)
def _layout(rows: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, dim], gl.float16 if dtype is torch.float16 else gl.bfloat16)


def _descriptor(tokens: Tensor, rows: int, dim: int) -> TensorDescriptor:
    found = flat(tokens)
    layout = _layout(rows, dim, tokens.dtype)
    return TensorDescriptor(found, list(found.shape), [found.stride(0), 1], [rows, dim], layout)


def forward(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float,
    config: HopperConfig | None = None, fresh: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp, [total_q, Hq, D] and [total_q, Hq]; `scale` above zero. `fresh`: compile everything."""
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    if tokens == 0 or key.shape[0] == 0:
        return query.new_zeros(query.shape), query.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    cfg = config or HEAD_DIMS[dim]
    tables: Tables = forward_tables(
        batch, causal, heads, kv_heads, query.device, block_m=_ROWS, block_n=cfg.block_n, together=False,
        split=cfg.split,
    )  # fmt: skip
    plan = tables.plan
    device = query.device
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if tables.blind:  # whole tiles without a key are not in the list
        out.zero_()
        lse.fill_(-torch.inf)
    parts = torch.empty((max(1, plan.slots), _ROWS, dim), dtype=torch.float32, device=device)
    parts_lse = torch.empty((max(1, plan.slots), _ROWS), dtype=torch.float32, device=device)
    count = tables.spans.shape[0]
    if count:
        hopper.attend[(count,)](
            _descriptor(query, 64, dim), _descriptor(key, cfg.block_n, dim), _descriptor(value, cfg.block_n, dim), out,
            lse, parts, parts_lse, tables.spans, scale * _LOG2E, out.stride(0), out.stride(1), heads,
            RATIO=heads // kv_heads, BLOCK_N=cfg.block_n, DIM=dim, STAGES=cfg.stages, TURNS=cfg.turns, num_warps=4,
        )  # fmt: skip
    if plan.merges or fresh:  # an empty grid compiles and does not run
        fore.merge[(len(plan.merges), _ROWS // 16)](
            out, lse, parts, parts_lse, tables.merges, tables.tokens, out.stride(0), out.stride(1), heads, PACKED=False,
            RATIO=heads // kv_heads, TOKENS=_ROWS, BLOCK_M=_ROWS, CHUNK=16, DIM=dim, num_warps=4,
        )  # fmt: skip
    return out, lse
