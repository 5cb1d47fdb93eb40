"""Masks in xFormers' words: causal and window as bias objects, anything else as an additive tensor.

xFormers broadcasts nothing: a tensor bias has to span batch, heads, queries and keys, be of the query's dtype on its
device, and start its rows on 16-byte boundaries. Bottom-right is LayerZero's alignment for windows and for
`is_causal="bottom_right"`; top-left comes only with `is_causal=True`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INF = float("inf")


def objects(vendor: Any, causal: Any, window: Any, rows: int, cols: int) -> Any:
    """The bias object for a causal mask and a window, or None where neither hides anything."""
    if window is None:
        if not causal:
            return None
        if causal is True and rows != cols:
            return vendor.LowerTriangularMask()
        return vendor.LowerTriangularFromBottomRightMask()
    left, right = window
    if causal:  # the diagonal is the right side
        if left < 0:
            return vendor.LowerTriangularFromBottomRightMask()
        return vendor.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=left + 1)
    # Unlimited sides reach past every key.
    reach = rows + cols
    return vendor.LocalAttentionFromBottomRightMask(
        window_left=reach if left < 0 else left, window_right=reach if right < 0 else right
    )


def written_out(causal: Any, window: Any, rows: int, cols: int, like: Tensor) -> Tensor | None:
    """A causal mask and a window as an additive [rows, cols], for a call that has a mask of its own as well."""
    if not causal and window is None:
        return None
    i = torch.arange(rows, device=like.device)[:, None] + (0 if causal is True else cols - rows)
    j = torch.arange(cols, device=like.device)[None, :]
    keep = j <= i if causal else torch.ones(rows, cols, dtype=torch.bool, device=like.device)
    if window is not None:
        left, right = window
        if left >= 0:
            keep = keep & (j >= i - left)
        if right >= 0:
            keep = keep & (j <= i + right)
    return torch.zeros(rows, cols, dtype=like.dtype, device=like.device).masked_fill_(~keep, -_INF)


def additive(mask: Tensor, more: Tensor | None, query: Tensor, cols: int) -> Tensor:
    """A mask as xFormers takes it: [B, H, Sq, Sk], the query's dtype, broadcast axes expanded, rows padded."""
    batch, rows, heads = query.shape[:3]
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -_INF)
    elif mask.dtype is not query.dtype:
        mask = mask.to(query.dtype)
    if more is not None:
        mask = mask + more
    step = 16 // mask.element_size()
    mask = mask.expand(*mask.shape[:-2], rows, cols)
    # Rows are laid out before batch and heads are expanded, so that a broadcast mask is stored once.
    uneven = cols % step or mask.stride(-1) != 1 or any(size % step for size in mask.stride()[:-1])
    if uneven or mask.data_ptr() % 16:
        padded = torch.zeros(*mask.shape[:-1], -(-cols // step) * step, dtype=mask.dtype, device=mask.device)
        padded[..., :cols] = mask
        mask = padded[..., :cols]
    return mask.expand(batch, heads, rows, cols)


def grouped(bias: Any, groups: int) -> Any:
    """A tensor bias beside five-dimensional inputs: [B, G, H/G, Sq, Sk]. Bias objects fit any rank."""
    if not isinstance(bias, Tensor):
        return bias
    batch, heads, rows, cols = bias.shape
    per, (over_batch, over_heads, *rest) = heads // groups, bias.stride()
    # Strides written out: a reshape may give an axis of one row a stride that is no multiple of 16 bytes.
    return bias.as_strided((batch, groups, per, rows, cols), (over_batch, over_heads * per, over_heads, *rest))
