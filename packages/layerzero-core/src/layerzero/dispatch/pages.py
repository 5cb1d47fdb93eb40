"""Only the pages a batch reads: what is converted for one call should not be the whole cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch

__all__ = ["casting_pages", "pages_in_use"]

_KEYS, _VALUES, _BATCH, _LAYOUT = 1, 2, 3, 9  # of the canonical arguments of paged_attention


def pages_in_use(batch: PagedBatch, page_size: int) -> tuple[Tensor, PagedBatch]:
    """Numbers of the pages a batch reads, and the same batch for a cache that holds just these, in this order.

    A page that two sequences share stands twice. What lies in the tables beyond a sequence's context is not read.
    """
    tables = batch.block_tables
    needed = -(-batch.max_context_len // page_size)
    counts = (batch.context_lens + (page_size - 1)) // page_size
    columns = torch.arange(needed, device=tables.device)
    pages = torch.where(columns < counts.unsqueeze(-1), tables[:, :needed], 0).reshape(-1)
    own = torch.arange(batch.batch_size * needed, dtype=tables.dtype, device=tables.device).view(-1, needed)
    return pages, PagedBatch(own, batch.context_lens, batch.query_lens, batch.context_lens_host, batch.query_lens_host)


def casting_pages(dtype: torch.dtype) -> Callable[[list[Any]], None]:
    """A step that casts the caches of a paged attention call: the pages in use, or all where that is less."""

    def step(values: list[Any]) -> None:
        keys, batch = values[_KEYS], values[_BATCH]
        page_size = keys.shape[1 if values[_LAYOUT] == "NHD" else 2]
        if batch.batch_size * -(-batch.max_context_len // page_size) < keys.shape[0]:
            pages, values[_BATCH] = pages_in_use(batch, page_size)
            # index_select, unlike indexing, refuses a negative page number.
            values[_KEYS] = torch.index_select(keys, 0, pages).to(dtype)
            values[_VALUES] = torch.index_select(values[_VALUES], 0, pages).to(dtype)
        else:
            values[_KEYS], values[_VALUES] = keys.to(dtype), values[_VALUES].to(dtype)

    return step
