"""Chunked attention (`lz.chunk_mask`) as one causal call per chunk: nothing of the size Sq × Sk is ever written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.masks import ChunkMask


def by_chunk(
    attend: Callable[[Tensor, Tensor, Tensor], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: ChunkMask,
    return_lse: bool,
) -> Any:
    """The results of `attend` on each chunk's queries and keys, put together.

    `attend` computes causal attention aligned to the bottom right; it has at least as many keys as queries.
    """
    rows, cols = query.shape[2], key.shape[2]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    if rows > cols:  # the first rows stand before every key
        outs.append(query.new_zeros((*query.shape[:2], rows - cols, value.shape[3])))
        lses.append(query.new_full((*query.shape[:2], rows - cols), -torch.inf, dtype=torch.float32))
    for first, last, start, stop in mask.spans(rows, cols):
        found = attend(query[:, :, first:last], key[:, :, start:stop], value[:, :, start:stop])
        outs.append(found[0] if return_lse else found)
        if return_lse:
            lses.append(found[1])
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return (out, torch.cat(lses, dim=2)) if return_lse else out


def lower_right(query: Tensor, key: Tensor) -> Tensor | None:
    """The causal mask aligned to the bottom right, for kernels that only know the other corner; None for one row."""
    rows, cols = query.shape[2], key.shape[2]
    if rows == 1:
        return None
    full = torch.full((rows, cols), -torch.inf, dtype=query.dtype, device=query.device)
    return full.triu(cols - rows + 1)
