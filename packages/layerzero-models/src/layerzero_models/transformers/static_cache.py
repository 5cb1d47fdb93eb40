"""One new token over a static cache: attention over the places in use, whose number only the device knows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from layerzero import attention, paged_attention
from layerzero.dispatch.late import current_world
from layerzero.errors import BackendNotAvailableError, NoKernelFoundError
from layerzero.model.kv_cache import PagedBatch
from layerzero_models.transformers.masking import Note

# Splits the context by the size of the cache and reads the lengths on the device, so that a graph captured once stays
# right while they grow. No other kernel promises that.
KERNEL = "triton.paged_attention.split"
_PAGES = (128, 64, 32, 16)


def present() -> bool:
    """Whether the kernel is installed."""
    return KERNEL in current_world().registry.kernels


def decode(
    query: Tensor, key: Tensor, value: Tensor, note: Note, scale: float | None, softcap: float | None
) -> Tensor | None:
    """query [B, H, 1, D] over the places in use of [B, Hkv, S, D]: [B, 1, H, D], or None where a mask has to do.

    On the CPU the number can be read. On an accelerator reading it would wait for the device, so the cache is seen as
    pages, and a kernel that reads the lengths there takes them.
    """
    used, window = note.used, note.window
    assert used is not None
    if key.is_cpu:
        count = int(used)
        key, value = key[:, :, :count], value[:, :, :count]
        out: Tensor = attention(query, key, value, scale=scale, window=window, softcap=softcap)
        return out.transpose(1, 2).contiguous()
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return None
    size = next((page for page in _PAGES if key.shape[2] % page == 0), None)
    same = key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    memo = current_world().memo  # what is true of one World may change in the next
    unusable = memo.setdefault("static_cache", set())
    case = (query.shape, key.shape, query.dtype, window is None, softcap is None)
    if size is None or not same or case in unusable or not present():
        return None
    batch = _batch(used, key.shape[0], key.shape[1], key.shape[2], size, key.device)
    try:
        paged: Tensor = paged_attention(
            query[:, :, 0], _pages(key, size), _pages(value, size), batch, scale=scale, window=window, softcap=softcap,
            layout="HND", backend=KERNEL,
        )  # fmt: skip
    except (NoKernelFoundError, BackendNotAvailableError):  # denied, not compiled yet, or not for these tensors
        unusable.add(case)
        return None
    return paged.unsqueeze(1)


def _pages(cache: Tensor, size: int) -> Tensor:
    """[B, Hkv, S, D] seen as pages [n, Hkv, size, D]: a page begins wherever a multiple of `size` rows does."""
    rows, heads, places, dim = cache.shape
    count = (rows - 1) * heads * (places // size) + places // size
    return cache.as_strided((count, heads, size, dim), (size * dim, places * dim, dim, 1))


def _batch(used: Tensor, rows: int, heads: int, places: int, size: int, device: torch.device) -> PagedBatch:
    """The batch of one step, kept on the tensor it was made from: all layers share it."""
    known: tuple[Any, PagedBatch] | None = getattr(used, "_layerzero_batch", None)
    shape = (rows, heads, places, size)
    if known is not None and known[0] == shape:
        return known[1]
    lengths = used.to(torch.int32).expand(rows).contiguous()
    tables = _tables(rows, heads, places, size, device)
    batch = PagedBatch(tables, lengths, None, (places,) * rows, (1,) * rows, capture=True)  # lengths of the device
    used._layerzero_batch = (shape, batch)  # type: ignore[attr-defined]
    return batch


@lru_cache(maxsize=64)
def _tables(rows: int, heads: int, places: int, size: int, device: torch.device) -> Tensor:
    first = torch.arange(rows, device=device, dtype=torch.int32) * (heads * (places // size))
    return first[:, None] + torch.arange(places // size, device=device, dtype=torch.int32)[None, :]
