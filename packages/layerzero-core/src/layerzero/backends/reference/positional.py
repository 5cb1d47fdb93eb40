"""Rotary embedding in both conventions, XPos, and the ALiBi slopes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.errors import InvalidInputError
from layerzero.reasons import ReasonCode

__all__ = ["alibi_slopes", "rope", "rope_halves", "token_rows", "xpos"]


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first `rotary_dim` elements of each head; the rest pass through.

    `cos`, `sin` are tables [S, rotary_dim / 2] (one angle per pair) or [B, S, rotary_dim] (element i multiplies
    element i, as transformers makes them). Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) when `interleaved`.
    `position_ids` ([S] or [B, S]) picks rows of the tables; without it token s uses row s.
    """
    full_cos, full_sin = _tables(q, cos, sin, interleaved, layout, position_ids)
    rotated_q = _rotate(q, full_cos, full_sin, interleaved, inplace)
    return rotated_q, None if k is None else _rotate(k, full_cos, full_sin, interleaved, inplace)


def rope_halves(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor | None]:
    """`rope` for compilers: pairs (i, i + rotary_dim / 2) are turned half by half, which makes one loop of it."""
    full = cos.dim() == 3  # the two elements of a pair have entries of their own
    half = cos.shape[-1] // 2 if full else cos.shape[-1]
    if interleaved or 2 * half > q.shape[-1]:
        return rope(q, k, cos, sin, interleaved, layout, position_ids, False)
    tables = token_rows((cos, sin), q, layout, position_ids)
    return _halves(q, tables, half, full), None if k is None else _halves(k, tables, half, full)


def _halves(x: Tensor, tables: list[Tensor], half: int, full: bool) -> Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, tables[0].dtype) else torch.float32
    cos, sin = (table.to(wide) for table in tables)
    turning = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    one, two = (part.to(wide) for part in turning.chunk(2, dim=-1))
    if full:
        turned = (one * cos[..., :half] - two * sin[..., :half], two * cos[..., half:] + one * sin[..., half:])
    else:
        turned = (one * cos - two * sin, two * cos + one * sin)
    parts = [part.to(x.dtype) for part in turned]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def xpos(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    scale_base: float,
    gamma: float,
    origin: float,
) -> tuple[Tensor, Tensor | None]:
    """Rotate as `rope`, and let q shrink and k grow with the position, so that a score decays with the distance.

    Pair i has the base zeta_i = (2i / rotary_dim + gamma) / (1 + gamma); at position n it multiplies q by
    zeta_i ** ((n - origin) / scale_base) and divides k by the same.
    """
    full_cos, full_sin = _tables(q, cos, sin, interleaved, layout, position_ids)
    dtype, rotary_dim = compute_dtype(q, cos), full_cos.shape[-1]
    # A rounded exponent is felt in the power, the more the farther the position; MPS alone has no float64.
    precise = torch.float32 if q.device.type == "mps" else torch.float64
    zeta = (torch.arange(0, rotary_dim, 2, dtype=precise, device=q.device) / rotary_dim + gamma) / (1 + gamma)
    seq_len = q.shape[-2] if layout == "BHSD" else q.shape[-3]
    positions = torch.arange(seq_len, device=q.device) if position_ids is None else position_ids
    power = (positions.to(precise)[..., None] - origin) / scale_base
    decay = (_full_width(zeta, interleaved) ** power).to(dtype)  # [S, R] or [B, S, R]
    if decay.dim() == 3 or layout != "BHSD":
        decay = decay.unsqueeze(-3 if layout == "BHSD" else -2)
    wide_cos, wide_sin = full_cos.to(dtype), full_sin.to(dtype)
    rotated_q = _rotate(q, wide_cos * decay, wide_sin * decay, interleaved, False)
    if k is None:
        return rotated_q, None
    return rotated_q, _rotate(k, wide_cos / decay, wide_sin / decay, interleaved, False)


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the ALiBi paper, float32 [num_heads].

    For a power of two they are the geometric sequence from 2^(-8/n); otherwise the sequence of the next lower power
    of two, followed by every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _tables(
    q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, layout: str, position_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cos and sin with a column for each element and a row for each token, ready to be multiplied with q."""
    full = [_full_width(table, interleaved) for table in (cos, sin)]
    full_cos, full_sin = token_rows(full, q, layout, position_ids)
    if full_cos.shape[-1] > q.shape[-1]:
        raise InvalidInputError(
            code=ReasonCode.SHAPE_INVALID,
            value=f"cos {tuple(cos.shape)}",
            limit=f"head_dim {q.shape[-1]}: [S, rotary_dim / 2] or [B, S, rotary_dim]",
        )
    return full_cos, full_sin


def token_rows(tables: Sequence[Tensor], q: Tensor, layout: str, position_ids: Tensor | None) -> list[Tensor]:
    """The rows of the tables for each token of q, with an axis for its heads."""
    seq_len = q.shape[-2] if layout == "BHSD" else q.shape[-3]
    found = [_rows(table, position_ids, seq_len) for table in tables]
    # A table of rank 2 in BHSD needs no head axis: [S, R] already lines up with [.., S, D].
    if found[0].dim() == 3 or layout != "BHSD":
        found = [table.unsqueeze(-3 if layout == "BHSD" else -2) for table in found]
    return found


def _full_width(table: Tensor, interleaved: bool) -> Tensor:
    """Bring a table of one angle per pair to one per element; a table of rank 3 is that wide already."""
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
    return torch.gather(table, 1, ids.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    dtype, rotary_dim = compute_dtype(x, cos), cos.shape[-1]
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
