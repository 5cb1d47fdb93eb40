"""RoPE with the tables of the call, in both conventions.

FlashInfer reads one float32 table, cosines in the first half of a row and sines in the second, and packed tokens
[T, H * D]. The table is written anew at each call, since tables belong to the caller and may change behind our back:
one small copy beside the rotation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from layerzero_flashinfer.plans import capturing
from layerzero_flashinfer.vendor import lib

__all__ = ["rope"]


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
    """Rotate q and k; heads that do not lie together for each token are gathered first."""
    if layout == "BHSD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    batch, seq = q.shape[:2]
    table = _table(cos, sin, seq if position_ids is None else cos.shape[0])
    positions = _positions(position_ids, batch, seq, q.device)
    flat = [item.reshape(batch * seq, -1) for item in (q, k)]
    if inplace:
        lib().apply_rope_with_cos_sin_cache_inplace(
            positions, flat[0], flat[1], q.shape[-1], table, is_neox=not interleaved
        )
        for item, rotated in zip((q, k), flat, strict=True):
            if rotated.data_ptr() != item.data_ptr():  # heads that do not lie together were gathered first
                item.copy_(rotated.view(item.shape))
        turned = [q, k]
    else:
        found = lib().apply_rope_with_cos_sin_cache(
            positions, flat[0], flat[1], q.shape[-1], table, is_neox=not interleaved
        )
        turned = [out.view(item.shape) for out, item in zip(found, (q, k), strict=True)]
    if layout == "BHSD":
        turned = [item.transpose(1, 2) for item in turned]
    return turned[0], turned[1]


def _table(cos: Tensor, sin: Tensor, rows: int) -> Tensor:
    """[rows, rotary] in float32: cosines, then sines."""
    if cos.shape[0] != rows:
        cos, sin = cos[:rows], sin[:rows]
    table = torch.empty((rows, 2 * cos.shape[1]), dtype=torch.float32, device=cos.device)
    return torch.cat((cos, sin), dim=1, out=table)


def _positions(position_ids: Tensor | None, batch: int, seq: int, device: torch.device) -> Tensor:
    """The table row of each packed token, without gaps."""
    if position_ids is not None:
        return position_ids.expand(batch, seq).reshape(-1).contiguous()
    if device.type != "cuda" or capturing():  # what a capture allocates belongs to its graph
        return _counted(batch, seq, device)
    return _kept(batch, seq, device)


def _counted(batch: int, seq: int, device: torch.device) -> Tensor:
    steps = torch.arange(seq, dtype=torch.int32, device=device)
    return steps if batch == 1 else steps.repeat(batch)


@lru_cache(maxsize=16)
def _kept(batch: int, seq: int, device: torch.device) -> Tensor:
    """The same numbers again and again: nobody writes to them."""
    made = _counted(batch, seq, device)
    torch.cuda.current_stream(device).synchronize()  # once: calls of other streams read it without waiting
    return made
