"""How tensors lie: sequences packed behind each other, as rows of equal length and back; channels or tokens dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def longest(cu_seqlens: Tensor, tokens: int) -> int:
    """The length of the longest sequence; that of all together where the host cannot read the offsets."""
    if torch.compiler.is_compiling() or cu_seqlens.device.type == "meta" or cu_seqlens.numel() < 2:
        return tokens
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return tokens
    return int(cu_seqlens.diff().max())


def padded(tensors: Sequence[Tensor], cu_seqlens: Tensor) -> list[Tensor]:
    """Tensors [1, T, …] as [N, L, …], zeros behind each sequence's end."""
    tokens = tensors[0].shape[1]
    length = longest(cu_seqlens, tokens)
    place = cu_seqlens[:-1, None] + torch.arange(length, device=cu_seqlens.device)
    outside = place >= cu_seqlens[1:, None]
    place = place.clamp(max=max(tokens - 1, 0)) if tokens else place[:, :0]
    rows = []
    for tensor in tensors:
        found = tensor[0][place]
        rows.append(found.masked_fill(outside.reshape(*outside.shape, *(1,) * (found.dim() - 2)), 0))
    return rows


def unpadded(rows: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N, L, …] as [1, T, …] again."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return rows[sequence, token - cu_seqlens[sequence]].unsqueeze(0)


def lies_in_rows(x: Tensor) -> bool:
    """Whether the channels of x [B, D, T] lie dense, as a projection leaves them; otherwise its tokens are taken to."""
    return x.stride(1) == 1 and x.stride(2) != 1


def empty_as(x: Tensor) -> Tensor:
    """An output of x's shape without gaps, its channels dense where those of x are."""
    batch, channels, tokens = x.shape
    if lies_in_rows(x):
        return x.new_empty(batch, tokens, channels).transpose(1, 2)
    return x.new_empty(batch, channels, tokens)
