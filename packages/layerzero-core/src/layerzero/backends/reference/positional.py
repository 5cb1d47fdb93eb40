"""Rotary embedding in both conventions, XPos, and the ALiBi slopes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.model.rotary import full_tables, full_width, rotate, rotated, token_rows

rope = rotated


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
    full_cos, full_sin = full_tables(q, cos, sin, interleaved, layout, position_ids)
    dtype, rotary_dim = compute_dtype(q, cos), full_cos.shape[-1]
    # A rounded exponent is felt in the power, the more the farther the position; MPS alone has no float64.
    precise = torch.float32 if q.device.type == "mps" else torch.float64
    pairs = torch.arange(0, rotary_dim, 2, dtype=precise, device=q.device)
    zeta = (pairs + gamma * rotary_dim) / ((1 + gamma) * rotary_dim)
    if position_ids is None:
        seq_len = q.shape[-2] if layout == "BHSD" else q.shape[-3]
        positions = torch.arange(seq_len, dtype=precise, device=q.device)
    else:
        positions = position_ids.to(precise)
    away = positions - origin if origin else positions
    power = away[..., None] / scale_base
    decay = (full_width(zeta, interleaved) ** power).to(dtype)  # [S, R] or [B, S, R]
    if decay.dim() == 3 or layout != "BHSD":
        decay = decay.unsqueeze(-3 if layout == "BHSD" else -2)
    wide_cos, wide_sin = full_cos.to(dtype), full_sin.to(dtype)
    rotated_q = rotate(q, wide_cos * decay, wide_sin * decay, interleaved, False)
    if k is None:
        return rotated_q, None
    return rotated_q, rotate(k, wide_cos / decay, wide_sin / decay, interleaved, False)


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the ALiBi paper, float32 [num_heads].

    For a power of two they are the geometric sequence from 2^(-8/n); otherwise the sequence of the next lower power
    of two, followed by every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
