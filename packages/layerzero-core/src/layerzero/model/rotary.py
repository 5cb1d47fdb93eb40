"""The rotary embedding in torch's own operations: the reference, and what other kernels leave to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def rotated(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, layout: str,
    position_ids: Tensor | None, inplace: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate the first `rotary_dim` elements of each head; the rest pass through. Canonical arguments of `rope`.

    `cos`, `sin` are tables [S, rotary_dim / 2] (one angle per pair) or [B, S, rotary_dim] (element i multiplies
    element i, as transformers makes them). Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) when `interleaved`.
    `position_ids` ([S] or [B, S]) picks rows of the tables; without it token s uses row s.
    """
    full = [full_width(table, interleaved) for table in (cos, sin)]
    full_cos, full_sin = token_rows(full, q, layout, position_ids)
    if full_cos.shape[-1] > q.shape[-1]:
        expected = f"head_dim {q.shape[-1]}: [S, rotary_dim / 2] or [B, S, rotary_dim]"
        raise invalid("SHAPE_INVALID", f"cos {tuple(cos.shape)}", expected)
    turned = rotate(q, full_cos, full_sin, interleaved, inplace)
    return turned, None if k is None else rotate(k, full_cos, full_sin, interleaved, inplace)


def token_rows(tables: Sequence[Tensor], q: Tensor, layout: str, position_ids: Tensor | None) -> list[Tensor]:
    """The rows of the tables for each token of q, with an axis for its heads."""
    seq_len = q.shape[-2] if layout == "BHSD" else q.shape[-3]
    found = [_rows(table, position_ids, seq_len) for table in tables]
    # A table of rank 2 in BHSD needs no head axis: [S, R] already lines up with [.., S, D].
    if found[0].dim() == 3 or layout != "BHSD":
        found = [table.unsqueeze(-3 if layout == "BHSD" else -2) for table in found]
    return found


def full_width(table: Tensor, interleaved: bool) -> Tensor:
    """Bring a table of one angle per pair to one per element; a table of rank 3 is that wide already."""
    import torch

    if table.dim() == 3:
        return table
    return table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)


def _rows(table: Tensor, position_ids: Tensor | None, seq_len: int) -> Tensor:
    """The table rows of each token: [S, R] or [B, S, R]."""
    if position_ids is None:
        return table[..., :seq_len, :]
    if table.dim() == 2:
        return table[position_ids]
    if table.shape[0] == 1:
        return table[0][position_ids]
    ids = position_ids.expand(table.shape[0], -1).long()
    return table.gather(1, ids.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    """Turn the first elements of each head by tables as wide as they are, in float32 (float64 where anything is)."""
    import torch

    dtype = torch.float64 if torch.float64 in (x.dtype, cos.dtype) else torch.float32
    rotary_dim = cos.shape[-1]
    head = x[..., :rotary_dim].to(dtype)
    if interleaved:
        turned = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = (head * cos.to(dtype) + turned * sin.to(dtype)).to(x.dtype)
    if inplace:
        x[..., :rotary_dim].copy_(rotated)
        return x
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
