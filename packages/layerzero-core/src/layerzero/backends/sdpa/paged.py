"""A paged KV cache on torch's attention kernels: gather the pages of each sequence, then attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.backends.sdpa.varlen import attend_cpu
from layerzero.model.kv_cache import PagedBatch

__all__ = ["gather_cpu"]


def gather_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: Any,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    layout: str,
) -> Any:
    """The blocked CPU kernel, one call per sequence; pages that a window hides are not gathered."""
    page = key_cache.shape[1] if layout == "NHD" else key_cache.shape[2]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    first = 0
    for row, (cols, rows) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        if rows == 0:
            continue
        # The first key that any of this sequence's queries may see, down to the start of its page.
        seen = 0 if window is None or window[0] < 0 else max(0, cols - rows - window[0]) // page * page
        pages = batch.block_tables[row, seen // page : -(-cols // page)]
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[row : row + 1]
        found = attend_cpu(
            query[first : first + rows].transpose(0, 1).unsqueeze(0),
            gather(key_cache, pages, cols - seen, layout),
            gather(value_cache, pages, cols - seen, layout),
            "bottom_right",
            scale,
            window,
            slopes,
            return_lse,
        )
        out, lse = found if return_lse else (found, None)
        outs.append(out[0].transpose(0, 1))
        if lse is not None:
            lses.append(lse[0].transpose(0, 1))
        first += rows
    packed = outs[0] if len(outs) == 1 else torch.cat(outs)
    return (packed, torch.cat(lses)) if return_lse else packed


def gather(cache: Tensor, pages: Tensor, length: int, layout: str) -> Tensor:
    """The first `length` tokens of some pages as [1, Hkv, length, D]."""
    # index_select, unlike cache[pages], refuses a negative page number instead of wrapping it to another sequence.
    blocks = torch.index_select(cache, 0, pages)
    if layout == "HND":
        return blocks.transpose(0, 1).flatten(1, 2)[:, :length].unsqueeze(0)
    return blocks.flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
