"""Grouped attention in one launch of FlashAttention 4.

Its variable-length kernel takes where each sequence's keys begin from `cu_seqlens_k` and how many there are from
`seqused_k`. So every group becomes a sequence of its own whose keys begin where those of the shared sequence do: the
groups read the same memory, nothing is copied, and one grid fills the device. Blocks of keys are longer than the
library's own choice, which is made for squares: here most blocks need no mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.attention import scaled
from layerzero.model.grouped import GroupedBatch, Lengths, Segment
from layerzero_flashattn.compiler import library
from layerzero_flashattn.quiet import quietly

# Rows and keys of a block by head_dim, measured on an H200 (benchmarks/results/h200); the library's own elsewhere.
_TILES = {128: (128, 160)}
_quiet = lru_cache(maxsize=2)(quietly)


class Sequences(NamedTuple):
    """The groups as sequences. `blind` are ranges of query rows that see no key and are left out."""

    starts_q: tuple[int, ...]
    lens_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    lens_k: tuple[int, ...]
    blind: tuple[tuple[int, int], ...]


def sequences(segments: tuple[Segment, ...], causal: bool) -> Sequences:
    """Every segment with its keys, in the order of the packed queries."""
    blind, found = [], []
    for s in segments:
        hidden = s.q_len if s.kv_len == 0 else max(0, s.q_len - s.kv_len) if causal else 0
        if hidden:
            blind.append((s.q_start, s.q_start + hidden))
        if hidden < s.q_len:
            found.append((s.q_start + hidden, s.q_len - hidden, s.k_start, s.kv_len))
    columns = zip(*found, strict=True) if found else ((), (), (), ())
    starts_q, lens_q, starts_k, lens_k = (tuple(column) for column in columns)
    return Sequences(starts_q, lens_q, starts_k, lens_k, tuple(blind))


class _Tables(NamedTuple):
    plan: Sequences
    cu_q: Tensor
    used_q: Tensor | None  # only where rows are left out: the library then stores its output in a slower way
    cu_k: Tensor
    used_k: Tensor


@lru_cache(maxsize=64)
def _tables(lengths: Lengths, causal: bool, device: torch.device) -> _Tables:
    """The first call with new lengths copies to the device; do that before a capture."""
    plan = sequences(GroupedBatch.of_lengths(lengths).segments(), causal)

    def tensor(numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(device)

    return _Tables(
        plan,
        tensor((*plan.starts_q, lengths[0][-1])),
        tensor(plan.lens_q) if plan.blind else None,
        tensor((*plan.starts_k, lengths[1][-1])),
        tensor(plan.lens_k),
    )


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, return_lse: bool
) -> Any:
    """FlashAttention 4's variable-length forward with the groups as sequences over the same keys."""
    batch.check(query, key, value)
    if query.shape[2] % 8 or not 8 <= query.shape[2] <= 256:
        raise InvalidInputError(code="HEAD_DIM_INVALID", value=query.shape[2], limit="8 to 256, a multiple of 8")
    query, scale = scaled(query, scale)
    tables = _tables(batch.lengths, causal, query.device)
    plan = tables.plan
    if not plan.lens_q:
        out = query.new_zeros(query.shape)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        return (out, lse) if return_lse else out
    interface = library("flash_attn.cute.interface")  # late: tables are made without it
    out, lse = _quiet(interface._flash_attn_fwd)(
        query,
        key,
        value,
        cu_seqlens_q=tables.cu_q,
        cu_seqlens_k=tables.cu_k,
        seqused_q=tables.used_q,
        seqused_k=tables.used_k,
        max_seqlen_q=max(plan.lens_q),
        max_seqlen_k=max(plan.lens_k),
        softmax_scale=scale,
        causal=causal,
        tile_mn=_TILES.get(query.shape[2]),
        return_lse=return_lse,
    )[:2]
    for start, end in plan.blind:
        out[start:end] = 0
        if return_lse:
            lse[:, start:end] = -torch.inf
    return (out, lse.t().contiguous()) if return_lse else out
