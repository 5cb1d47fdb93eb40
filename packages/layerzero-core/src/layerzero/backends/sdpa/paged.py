"""A paged KV cache on torch's attention kernels: gather the pages of each sequence, then attend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.backends.reference.paged import gather, sequences
from layerzero.backends.sdpa.varlen import attend_cpu
from layerzero.model.attention import packed
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

    def sequence(row: int, queries: Tensor, pages: Tensor, cols: int) -> Any:
        # The first key that any of this sequence's queries may see, down to the start of its page.
        seen = 0 if window is None or window[0] < 0 else max(0, cols - queries.shape[2] - window[0]) // page * page
        keys, values = (gather(cache, pages[seen // page :], cols - seen, layout) for cache in (key_cache, value_cache))
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[row : row + 1]
        return attend_cpu(queries, keys, values, "bottom_right", scale, window, slopes, return_lse)

    found = (sequence(*item) for item in sequences(batch, query, page))
    return packed(found, query, value_cache, return_lse)
