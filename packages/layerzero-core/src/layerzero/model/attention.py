"""What adapters over attention kernels of many libraries have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Attended: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""A result of attention: alone, or with its log-sum-exp."""


def upright(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, for kernels that scale after masking: -inf times -1 is no mask."""
    return (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)


def scaled(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The query and a positive scale that give the same scores; 1 / sqrt(head_dim) where none is asked for."""
    if scale is None:
        return query, float(query.shape[-1] ** -0.5)
    return (query, scale) if scale > 0.0 else upright(query, scale)


def no_keys(query: Tensor, value: Tensor, return_lse: bool) -> Attended:
    """The result of queries [..., D] over no key at all: zeros, and -inf."""
    import torch

    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    return (out, query.new_full(query.shape[:-1], -math.inf, dtype=torch.float32)) if return_lse else out


def packed(found: Iterable[Attended], query: Tensor, value: Tensor, return_lse: bool) -> Attended:
    """Results [n, H, S, D] (and log-sum-exp [n, H, S]) of sequences, one after another, as those of packed tokens."""
    import torch

    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for item in found:
        out, lse = item if isinstance(item, tuple) else (item, None)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        if lse is not None:
            lses.append(lse.transpose(1, 2).flatten(0, 1))
    if not outs:
        return no_keys(query[:0], value, return_lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return (out, torch.cat(lses)) if return_lse else out


def offsets(*lengths: Iterable[int]) -> Iterator[Tensor]:
    """Where each of some packed sequences begins, int32 [B + 1] on the host, from their lengths."""
    import torch

    for item in lengths:
        yield torch.tensor([0, *itertools.accumulate(item)], dtype=torch.int32)


def slopes_of_heads(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the ALiBi paper: of the next lower power of two, then every other one of the next higher."""
    import torch

    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """-slope * |q_pos - k_pos| with slopes [H] or [B, H]; shape [1 or B, H, Sq, Sk]."""
    import torch

    q_pos = torch.arange(seq_q, device=slopes.device).unsqueeze(-1) + (seq_k - seq_q)
    distance = (q_pos - torch.arange(seq_k, device=slopes.device)).abs()
    per_head = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    return -per_head[:, :, None, None] * distance


def band(
    is_causal: bool | str, window: tuple[int, int] | None, seq_q: int, seq_k: int, device: torch.device
) -> Tensor | None:
    """Which (query, key) pairs the causal triangle and the window let attend, or None when all may."""
    import torch

    if not is_causal and (window is None or (window[0] < 0 and window[1] < 0)):
        return None
    shift = 0 if is_causal is True else seq_k - seq_q
    q_pos = torch.arange(seq_q, device=device).unsqueeze(-1) + shift
    return inside(torch.arange(seq_k, device=device), q_pos, is_causal, window)


def inside(keys: Tensor, queries: Tensor, is_causal: bool | str, window: tuple[int, int] | None) -> Tensor:
    """Where the causal triangle and the window let a query attend a key, by their positions, which broadcast."""
    import torch

    # No further than integers that positions can be added to.
    left, right = (min(side, 1 << 62) for side in window) if window is not None else (-1, -1)
    right = 0 if is_causal else right
    # Compared as they are: a table of distances would take eight bytes for each answer.
    found = keys <= queries + right if right >= 0 else None
    if left >= 0:
        near = keys >= queries - left
        return near if found is None else found.logical_and_(near)
    return torch.ones_like(keys == queries) if found is None else found
