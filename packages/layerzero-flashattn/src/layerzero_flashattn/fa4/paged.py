"""FlashAttention 4 over a paged cache: its forward with page numbers and the length of each sequence.

A page that is exactly one tile of keys is read whole, past the end of the sequence, and what lies there must be
finite; a fresh cache promises nothing, so the descriptor leaves out the page sizes of tiles (128 for head_dim <= 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import scaled
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero_flashattn.fa4.kernels import families, plain_forward
from layerzero_flashattn.shared import dead_rows, packed_offsets

__all__ = ["paged_decode", "paged_prefill"]


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: None,
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """One new token a sequence; lengths and page numbers stay on the device."""
    out, lse = _paged(query.unsqueeze(1), key_cache, value_cache, batch, scale, window, return_lse)
    out = out.squeeze(1)
    return (out, lse.squeeze(-1)) if return_lse and lse is not None else out


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: None,
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """Any number of new tokens a sequence."""
    packed = {"cu_seqlens_q": packed_offsets(batch, query.device)[0], "max_seqlen_q": batch.max_query_len}
    out, lse = _paged(query, key_cache, value_cache, batch, scale, window, return_lse, **packed)

    def tokens(length: int) -> object:
        pages = -(-length // key_cache.shape[1])
        few = make_paged_batch(
            batch.block_tables.new_zeros((1, pages)),
            batch.context_lens.new_full((1,), length),
            batch.context_lens.new_full((1,), length),
            host_lens=((length,), (length,)),
        )
        ends = {"cu_seqlens_q": packed_offsets(few, query.device)[0], "max_seqlen_q": length}
        some = query.new_zeros((length, *query.shape[1:]))
        return _paged(some, key_cache, value_cache, few, scale, window, return_lse, **ends)

    shape = (query.shape[1:], key_cache.shape[1:], value_cache.shape[3], query.dtype, query.get_device())
    families.complete(("paged", *shape, window, return_lse), query, tokens)
    return (out, dead_rows(lse).transpose(0, 1)) if return_lse and lse is not None else out


def _paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    return_lse: bool,
    **packed: Any,
) -> tuple[Tensor, Tensor | None]:
    query, scale = scaled(query, scale)
    pages = {
        "seqused_k": batch.context_lens.to(torch.int32),
        "page_table": batch.block_tables.to(torch.int32),
        "max_seqlen_k": batch.max_context_len,
    }
    return plain_forward(query, key_cache, value_cache, scale, True, window, return_lse, **pages, **packed)
