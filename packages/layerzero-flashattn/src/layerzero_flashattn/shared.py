"""What the adapters of all three generations have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from layerzero.model.attention import offsets
from layerzero.model.kv_cache import PagedBatch

__all__ = ["NO_WINDOW", "dead_rows", "may_have_dead_rows", "packed_offsets", "sides"]

NO_WINDOW = (-1, -1)


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


def packed_offsets(batch: PagedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sequence's queries and keys begin, int32 [B + 1] each, from the lengths the host knows."""
    found = list(offsets(batch.query_lens_host, batch.context_lens_host))
    if device.type == "cuda":
        found = [item.pin_memory() for item in found]  # only a copy from pinned memory does not wait
    first, second = (item.to(device, non_blocking=True) for item in found)
    return first, second
