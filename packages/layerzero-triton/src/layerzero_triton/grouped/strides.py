"""Packed tokens as the two-dimensional arrays that the copy engine reads."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flat"]


def flat(tokens: Tensor) -> Tensor:
    """[tokens, H, D] as [tokens, H * D] in place if the strides allow it and suit the copy engine, else a copy."""
    count, heads, dim = tokens.shape
    by_token, by_head, by_dim = tokens.stride()
    size = tokens.element_size()
    fits = by_dim == 1 and (by_head == dim or heads == 1) and by_token >= heads * dim
    if not fits or by_token * size % 16 or tokens.data_ptr() % 16:
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        by_token = heads * dim
    return torch.as_strided(tokens, (count, heads * dim), (by_token, 1))
