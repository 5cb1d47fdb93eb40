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
from layerzero_flashattn.interface import packed_offsets, paged


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, return_lse: bool, *, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float, **packed: Any,
) -> Any:  # fmt: skip
    """Lengths and page numbers stay on the device; the descriptor lets no softcap come here."""
    query, scale = scaled(query, softmax_scale)
    pages = {
        "seqused_k": batch.context_lens.to(torch.int32),
        "page_table": batch.block_tables.to(torch.int32),
        "max_seqlen_k": batch.max_context_len,
    }
    out, lse = plain_forward(query, keys, values, (scale, causal, window_size, return_lse), **pages, **packed)
    return (out, lse) if return_lse else out


def _prefill(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, return_lse: bool, **options: Any) -> Any:
    """Any number of new tokens a sequence."""

    def run(query: Tensor, batch: PagedBatch) -> Any:
        packed: dict[str, Any] = {
            "cu_seqlens_q": packed_offsets(batch, query.device)[0],
            "max_seqlen_q": batch.max_query_len,
        }
        return _decode(query, keys, values, batch, return_lse, **packed, **options)

    def tokens(length: int) -> object:
        lens = batch.context_lens.new_full((1,), length)
        table = batch.block_tables.new_zeros((1, -(-length // keys.shape[1])))
        few = make_paged_batch(table, lens, lens, host_lens=((length,), (length,)))
        return run(query.new_zeros((length, *query.shape[1:])), few)

    found = run(query, batch)
    shape = (query.shape[1:], keys.shape[1:], values.shape[3], query.dtype, query.get_device())
    families.complete(("paged", *shape, options["window_size"], return_lse), query, tokens)
    return found


paged_decode, paged_prefill = paged(_decode), paged(_prefill, prefill=True)
