"""A plan as the int32 tables that kernels read, kept for as long as the same lengths come back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from layerzero.model.grouped import GroupedBatch, Lengths
from layerzero_triton.grouped.plan import Plan, Tile, make_plan

_KEPT = 64  # plans; a training loop uses one or two


@dataclass(frozen=True, slots=True)
class Tables:
    """What the kernels read.

    items [n, 8]       tile, head, low, high, slot, key start, free, 0; all keys before `free` are seen by every row
    tokens, limits     [tiles * tokens per tile] the token of every row (-1 for none) and the keys it sees
    """

    plan: Plan
    items: Tensor
    merges: Tensor
    tokens: Tensor
    limits: Tensor


@dataclass(frozen=True, slots=True)
class BackwardTables:
    """blocks [n, 4]: sequence, key start, first key, keys of the sequence. segments [B * G, 4], see `_segments`."""

    blocks: Tensor
    segments: Tensor
    groups: int


def forward_tables(
    batch: GroupedBatch, causal: bool, heads: int, kv_heads: int, device: torch.device, *, block_m: int, block_n: int,
    together: bool, split: bool = True,
) -> Tables:  # fmt: skip
    """The forward's tables on `device`. The first call with new lengths plans and copies; do that before a capture."""
    return _forward(batch.lengths, causal, heads, kv_heads, device, block_m, block_n, together, split)


def backward_tables(batch: GroupedBatch, causal: bool, device: torch.device, *, block_n: int) -> BackwardTables:
    """The tables of dK and dV on `device`."""
    return _backward(batch.lengths, causal, device, block_n)


@lru_cache(maxsize=_KEPT)
def _forward(
    lengths: Lengths, causal: bool, heads: int, kv_heads: int, device: torch.device, block_m: int, block_n: int,
    together: bool, split: bool,
) -> Tables:  # fmt: skip
    plan = make_plan(
        GroupedBatch.of_lengths(lengths), causal=causal, heads=heads, kv_heads=kv_heads, block_m=block_m,
        block_n=block_n, together=together, processors=_processors(device), split=split,
    )  # fmt: skip
    items = []
    for item in plan.items:
        tile = plan.tiles[item.tile]
        free = item.low + max(0, min(tile.shortest, item.high) - item.low) // block_n * block_n
        items.append((item.tile, item.head, item.low, item.high, item.slot, tile.key_start, free, 0))
    tokens, limits = _rows(plan.tiles, plan.tokens_per_tile)
    return Tables(
        plan,
        torch.tensor(items, dtype=torch.int32).reshape(-1, 8).to(device),
        torch.tensor(plan.merges, dtype=torch.int32).reshape(-1, 4).to(device),
        tokens.to(device),
        limits.to(device),
    )


def _rows(tiles: tuple[Tile, ...], room: int) -> tuple[Tensor, Tensor]:
    """Token and limit of every row; token -1 where a tile has rows to spare."""
    tokens = torch.full((len(tiles), room), -1, dtype=torch.int32)
    limits = torch.zeros((len(tiles), room), dtype=torch.int32)
    for index, tile in enumerate(tiles):
        at = 0
        for span in tile.spans:
            steps = torch.arange(span.size, dtype=torch.int32)
            tokens[index, at : at + span.size] = span.token + steps
            limits[index, at : at + span.size] = span.limit + span.step * steps
            at += span.size
    return tokens.flatten(), limits.flatten()


@lru_cache(maxsize=_KEPT)
def _backward(lengths: Lengths, causal: bool, device: torch.device, block_n: int) -> BackwardTables:
    batch = GroupedBatch.of_lengths(lengths)
    offsets = batch.cu_seqlens_k_host
    # Early keys are seen by the most queries: first block of every sequence, then the second, and so on.
    blocks = sorted(
        (low, sequence, offsets[sequence], offsets[sequence + 1] - offsets[sequence])
        for sequence in range(batch.batch_size)
        for low in range(0, offsets[sequence + 1] - offsets[sequence], block_n)
    )
    rows = [(sequence, start, low, length) for low, sequence, start, length in blocks]
    segments = _segments(batch, causal)
    return BackwardTables(
        torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device),
        torch.tensor(segments, dtype=torch.int32).reshape(-1, 4).to(device),
        batch.num_groups,
    )


def _segments(batch: GroupedBatch, causal: bool) -> list[tuple[int, int, int, int]]:
    """For every sequence and group: first query, queries, keys its first query sees, how that grows."""
    found = [(0, 0, 0, 0)] * (batch.batch_size * batch.num_groups)
    for s in batch.segments():
        place = s.sequence * batch.num_groups + s.group
        found[place] = (s.q_start, s.q_len, s.kv_len - s.q_len + 1, 1) if causal else (s.q_start, s.q_len, s.kv_len, 0)
    return found


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
