"""What the adapters of all three generations have in common."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch

__all__ = ["NO_WINDOW", "dead_rows", "may_have_dead_rows", "no_keys", "packed_offsets", "sides", "upright"]

NO_WINDOW = (-1, -1)


def upright(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale: these kernels scale after masking, and -inf times -1 is no mask."""
    return (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)


def sides(window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """A window in FlashAttention 4's words, where an unlimited side is None."""
    if window is None:
        return None, None
    left, right = window
    return (None if left < 0 else left), (None if right < 0 else right)


def may_have_dead_rows(query_len: int, key_len: int, is_causal: bool | str, window: tuple[int, int] | None) -> bool:
    """Whether some query row can be left without any key; its log-sum-exp is then not always written as -inf."""
    return window is not None or (bool(is_causal) and query_len > key_len)


def dead_rows(lse: Tensor) -> Tensor:
    """-inf where a kernel wrote +inf as the log-sum-exp of a row that attends nothing."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def no_keys(query: Tensor, value: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The result of packed queries over no key at all: zeros, and -inf."""
    out = query.new_zeros((*query.shape[:2], value.shape[-1]))
    return (out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)) if return_lse else out


def packed_offsets(batch: PagedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sequence's queries and keys begin, int32 [B + 1] each, from the lengths the host knows."""
    offsets = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for lengths in (batch.query_lens_host, batch.context_lens_host)
    ]
    if device.type == "cuda":
        offsets = [item.pin_memory() for item in offsets]  # only a copy from pinned memory does not wait
    first, second = (item.to(device, non_blocking=True) for item in offsets)
    return first, second
