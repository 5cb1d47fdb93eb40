"""RoPE with the tables of the call, in both conventions.

FlashInfer reads one float32 table, cosines in the first half of a row and sines in the second, and packed tokens. The
table is written anew at each call, since tables belong to the caller and may change behind our back (a replayed graph
writes without telling): one small copy beside the rotation. The kernel is called through the function that
FlashInfer's public calls end in: it takes [T, H, D] with the strides they have, so that nothing is gathered where one
sequence lies head by head. A release in which that function has changed is called by its public door.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from layerzero_flashinfer.plans import capturing
from layerzero_flashinfer.vendor import lib, part, starts_with

_INNER = ("q", "k", "q_rope", "k_rope", "cos_sin_cache", "pos_ids", "interleave")


@cache
def _inner() -> Callable[..., Any] | None:
    """What the public calls end in; None: only the public door is known."""
    found = getattr(part("rope"), "_apply_rope_pos_ids_cos_sin_cache", None)
    return found if found is not None and starts_with(found, _INNER) else None


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k; heads that the kernel cannot read where they lie are gathered first."""
    if layout == "BHSD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = q.shape
    batch, seq = shape[0], shape[1]
    table = _table(cos, sin, seq if position_ids is None else cos.shape[0])
    positions = _positions(position_ids, batch, seq, q.device)
    rows_q, rows_k = _rows(q, batch, seq), _rows(k, batch, seq)
    inner = _inner()
    if inner is None:
        out_q, out_k = _publicly(rows_q, rows_k, table, positions, interleaved)
    else:
        out_q, out_k = (rows_q, rows_k) if inplace else (torch.empty_like(rows_q), torch.empty_like(rows_k))
        inner(rows_q, rows_k, out_q, out_k, table, positions, interleaved)
    if inplace:
        for item, rotated in ((q, out_q), (k, out_k)):
            if rotated.data_ptr() != item.data_ptr():  # was gathered first
                item.copy_(rotated.view(item.shape))
    else:
        q, k = (out_q[None], out_k[None]) if batch == 1 else (out_q.view(shape), out_k.view(k.shape))
    return (q.transpose(1, 2), k.transpose(1, 2)) if layout == "BHSD" else (q, k)


def _rows(item: Tensor, batch: int, seq: int) -> Tensor:
    """[B, S, H, D] as [T, H, D]; the kernel reads 16 bytes at a time, so a head begins at a multiple of that."""
    found = item[0] if batch == 1 else item.reshape(batch * seq, *item.shape[2:])
    strides = found.stride()
    return found.contiguous() if (strides[0] | strides[1]) & 7 else found


def _publicly(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """By the public door, which takes and gives [T, H * D]."""
    flat = q.reshape(q.shape[0], -1), k.reshape(k.shape[0], -1)
    found = lib().apply_rope_with_cos_sin_cache(positions, *flat, q.shape[-1], table, is_neox=not interleaved)
    return found[0].view(q.shape), found[1].view(k.shape)


def _table(cos: Tensor, sin: Tensor, rows: int) -> Tensor:
    """[rows, rotary] in float32: cosines, then sines."""
    if cos.shape[0] != rows:
        cos, sin = cos[:rows], sin[:rows]
    # Joined as they are and then widened: joining into wider memory is torch's slow way, one copy for each part.
    return torch.cat((cos, sin), 1).float()


def _positions(position_ids: Tensor | None, batch: int, seq: int, device: torch.device) -> Tensor:
    """The table row of each packed token, without gaps."""
    if position_ids is not None:
        return position_ids.expand(batch, seq).reshape(-1).contiguous()
    if capturing():  # what a capture allocates belongs to its graph
        return _counted(batch, seq, device)
    return _kept(batch, seq, device)


def _counted(batch: int, seq: int, device: torch.device) -> Tensor:
    steps = torch.arange(seq, dtype=torch.int32, device=device)
    return steps if batch == 1 else steps.repeat(batch)


@lru_cache(maxsize=16)
def _kept(batch: int, seq: int, device: torch.device) -> Tensor:
    """The same numbers again and again: nobody writes to them."""
    made = _counted(batch, seq, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once: calls of other streams read it without waiting
    return made
