"""Rotary embedding in both conventions, and XPos."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.model.rotary import rotate, rotated, token_rows

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
    return halves(q, tables, half, full), None if k is None else halves(k, tables, half, full)


def halves(x: Tensor, tables: Sequence[Tensor], half: int, full: bool) -> Tensor:
    """The halves of each head, turned and put together again."""
    wide = torch.float64 if torch.float64 in (x.dtype, tables[0].dtype) else torch.float32
    cos, sin = (table.to(wide) for table in tables)
    turning = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and x.requires_grad:
        # As models write it, in their order: an element is computed once and not for either half, and a compiler makes
        # one loop of it and of the copies around attention, forward and backward.
        if not full:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        own = turning * cos
        other = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1) * sin
        parts = [(own + other).to(x.dtype)]
    else:
        one, two = (part.to(wide) for part in turning.chunk(2, dim=-1))
        cos_one, sin_one, cos_two, sin_two = cos, sin, cos, sin  # tables of half the width serve both halves
        if full:
            (cos_one, cos_two), (sin_one, sin_two) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        turned = torch.addcmul(one * cos_one, two, sin_one, value=-1), torch.addcmul(two * cos_two, one, sin_two)
        parts = [part.to(x.dtype) for part in turned]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


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
    full, device = cos.dim() == 3, q.device
    half = cos.shape[-1] // 2 if full else cos.shape[-1]
    # A rounded exponent is felt in the power, the more the farther the position; MPS alone has no float64.
    precise = torch.float32 if device.type == "mps" else torch.float64
    first, last = gamma / (1 + gamma), (gamma + 1 - 1 / half) / (1 + gamma)
    zeta = torch.linspace(first, last, half, dtype=precise, device=device)
    if position_ids is None:
        seq_len = q.shape[-2] if layout == "BHSD" else q.shape[-3]
        ends = -origin / scale_base, (seq_len - 1 - origin) / scale_base
        powers = torch.linspace(*ends, seq_len, dtype=precise, device=device)
    else:
        powers = (position_ids.to(precise) - origin) / scale_base
    decay = zeta.pow(powers.unsqueeze(-1)).to(compute_dtype(q, cos))
    if full:  # [B, S, R] and not [S, R / 2]
        decay = decay.repeat_interleave(2, dim=-1) if interleaved else torch.cat((decay, decay), dim=-1)
    if decay.dim() == 3 or layout != "BHSD":
        decay = decay.unsqueeze(-3 if layout == "BHSD" else -2)
    rows = token_rows((cos, sin), q, layout, position_ids)

    def turned(x: Tensor, tables: list[Tensor]) -> Tensor:
        if not interleaved:
            return halves(x, tables, half, full)
        cos, sin = tables if full else (table.repeat_interleave(2, dim=-1) for table in tables)
        return rotate(x, cos, sin, True, False)

    turned_q = turned(q, [table * decay for table in rows])
    return turned_q, None if k is None else turned(k, [table / decay for table in rows])
