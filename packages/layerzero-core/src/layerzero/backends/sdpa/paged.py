"""A paged KV cache on torch's attention kernels: gather the pages of each sequence, then attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference.paged import one_by_one
from layerzero.backends.sdpa.varlen import attend_cpu
from layerzero.model.kv_cache import PagedBatch


class _Prepared:
    """What adapters found out about the pages of a batch, for the layers that follow."""

    __slots__ = ("found", "version")

    def __init__(self, found: Any, version: int | None) -> None:
        self.found, self.version = found, version

    def replan(self, batch: PagedBatch) -> None:
        self.version = -1  # of no tensor: it is made again


def prepared(batch: PagedBatch, make: Callable[..., Any], *sizes: int) -> Any:
    """`make(batch, *sizes)`, made once for a batch, and again where its tables were written to."""
    tables = batch.block_tables
    stream = torch._C._cuda_getCurrentRawStream(tables.get_device()) if tables.is_cuda else 0
    key = (make, sizes, stream, torch.is_inference_mode_enabled())
    version = None if tables.is_inference() else tables._version
    plan = batch.plans.get(key)
    if not isinstance(plan, _Prepared) or plan.version != version:
        plan = batch.plans[key] = _Prepared(make(batch, *sizes), version)
    return plan.found


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

    def attend(queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> Any:
        return attend_cpu(queries, keys, values, "bottom_right", scale, window, slopes, return_lse)

    left = -1 if window is None else window[0]
    return one_by_one(attend, query, (key_cache, value_cache), batch, layout, alibi_slopes, return_lse, left)
