"""Grouped attention in one launch of FlashInfer's Hopper prefill.

Its planner takes where each request's keys begin and how many there are as two lists. So every group becomes a request
whose keys begin where those of the shared sequence do: the groups read the same memory, nothing is copied, and its
work list, longest first, covers all groups. The wrapper classes derive the second list from the first, which would
forbid an overlap; this calls the module below them.
"""

from __future__ import annotations

import importlib
import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.attention import scaled
from layerzero.model.grouped import GroupedBatch, Lengths, Segment
from layerzero_flashinfer.options import LN2, live_rows, no_keys

_CAUSAL, _FULL, _NHD = 1, 0, 0
_HEAD_DIMS = (64, 128, 256)
_HALVES = (torch.float16, torch.bfloat16)
_SMALLEST_TILE = 64  # rows; FlashInfer takes 128 or more, so its work list is never longer than with this many


class Requests(NamedTuple):
    """The groups as requests, in the order of the packed queries; rows that see no key are requests without keys."""

    offsets_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    lens_k: tuple[int, ...]


def requests(segments: tuple[Segment, ...], causal: bool) -> Requests:
    """Every segment with its keys."""
    rows, starts, lens = [], [], []
    for s in segments:
        queries, keys = live_rows(causal, [s.q_len], [s.kv_len])
        rows += queries
        starts += [s.k_start] * len(keys)
        lens += keys
    return Requests((0, *itertools.accumulate(rows)), tuple(starts), tuple(lens))


class _Planned(NamedTuple):
    """A module, its plan, the memory the plan lives in, and the rows that see no key."""

    module: Any
    info: Any
    floats: Tensor
    ints: Tensor
    pinned: Tensor
    offsets_q: Tensor
    starts_k: Tensor
    unseen: tuple[tuple[int, int], ...]  # the kernel writes a large negative number for their log-sum-exp


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@lru_cache(maxsize=64)
def _planned(
    lengths: Lengths, causal: bool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    device: torch.device,
) -> _Planned:  # fmt: skip
    plan = requests(GroupedBatch.of_lengths(lengths).segments(), causal)
    vendor = importlib.import_module("flashinfer.prefill")
    module = vendor.get_batch_prefill_module("fa3", dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False)
    rows = plan.offsets_q[-1]
    works = (-(-rows // _SMALLEST_TILE) + len(plan.lens_k)) * heads
    size = 8 * (4 * works + 64) + 4096
    floats = torch.empty(16, dtype=torch.uint8, device=device)
    ints = torch.empty(size, dtype=torch.uint8, device=device)
    pinned = _pinned(size)
    host_q, host_k, host_len = (
        torch.tensor(n, dtype=torch.int32) for n in (plan.offsets_q, (*plan.starts_k, lengths[1][-1]), plan.lens_k)
    )
    info = module.plan(
        floats, ints, pinned, host_q, host_k, host_len, rows, len(plan.lens_k), heads, kv_heads, 1, False, dim, dim,
        causal, -1,
    )  # fmt: skip
    unseen = no_keys(False, host_q.diff().tolist(), plan.lens_k)
    return _Planned(module, info, floats, ints, pinned, host_q.to(device), host_k.to(device), unseen)


def _check(query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch) -> None:
    """What the launch relies on: the module takes pointers and strides, and believes the plan."""
    batch.check(query, key, value)
    if query.shape[2] not in _HEAD_DIMS:
        raise InvalidInputError(code="HEAD_DIM_INVALID", value=query.shape[2], limit=str(_HEAD_DIMS))
    if query.is_cuda and (query.dtype not in _HALVES or not query.dtype == key.dtype == value.dtype):
        raise InvalidInputError(code="DTYPE_UNSUPPORTED", value=str(query.dtype), limit="float16 or bfloat16")


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, batch: GroupedBatch, causal: bool, scale: float | None, return_lse: bool
) -> Any:
    """FlashInfer's ragged prefill with the groups as requests over the same keys."""
    _check(query, key, value, batch)
    tokens, heads, dim = query.shape
    query, scale = scaled(query, scale)
    if tokens == 0 or key.shape[0] == 0:
        out = query.new_zeros(query.shape)
        lse = query.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
        return (out, lse) if return_lse else out
    plan = _planned(batch.lengths, causal, heads, key.shape[1], dim, query.dtype, query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logs = torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if return_lse else None
    plan.module.ragged_run(
        plan.floats, plan.ints, plan.info, query, key, value, plan.offsets_q, plan.starts_k, out, logs,
        _CAUSAL if causal else _FULL, _NHD, -1, False, None, None, None, None, None, None, 0.0, scale, 1.0, 1e4, 0,
    )  # fmt: skip
    if logs is None:
        return out
    logs = logs * LN2
    for first, last in plan.unseen:
        logs[first:last] = -torch.inf
    return out, logs
