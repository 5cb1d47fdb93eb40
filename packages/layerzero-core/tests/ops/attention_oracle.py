"""Attention in float64 by its formula, written apart from the reference; differentiable. Tests get it as `oracle`."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch


def visible(rows, cols, causal=False, window=None):
    """Which pairs (query row, key) may meet: the definition of causal and window, pair by pair."""
    left, right = (-1, -1) if window is None else (window, 0) if isinstance(window, int) else window
    table = torch.zeros(rows, cols, dtype=torch.bool)
    for i in range(rows):
        at = i if causal is True else i + cols - rows
        first = 0 if left < 0 else at - left
        last = cols - 1 if right < 0 else at + right
        if causal:
            last = min(last, at)
        if last >= 0:
            table[i, max(0, first) : last + 1] = True
    return table


def attention(q, k, v, *, mask=None, causal=False, scale=None, window=None, softcap=None, slopes=None):
    """(out, log-sum-exp) of [B, H, S, D] tensors, in float64 whatever came in; rows without keys give zeros."""
    q, k, v = (t if t.dtype is torch.float64 else t.double() for t in (q, k, v))
    batch, heads, rows, dim = q.shape
    cols, group = k.shape[2], heads // k.shape[1]
    k, v = (t.unsqueeze(2).expand(-1, -1, group, -1, -1).reshape(batch, heads, cols, t.shape[-1]) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        ends = torch.arange(cols - rows, cols, dtype=torch.float64, device=scores.device)
        far = (ends[:, None] - torch.arange(cols, device=scores.device)).abs()
        scores = scores - slopes.double().reshape(-1, heads, 1, 1) * far
    keep = visible(rows, cols, causal, window).to(scores.device)
    if mask is not None and mask.dtype is torch.bool:
        keep = keep & mask
    elif mask is not None:
        scores = scores + mask.double()
        keep = keep & (mask != -math.inf)
    keep = keep.expand_as(scores)
    top = scores.detach().masked_fill(~keep, -math.inf).amax(-1, keepdim=True) if cols else scores.new_zeros(1)
    top = top.masked_fill(top == -math.inf, 0.0)
    powers = torch.where(keep, torch.exp(torch.where(keep, scores - top, 0.0)), 0.0)
    total = powers.sum(-1, keepdim=True)
    dead = ~keep.any(-1, keepdim=True)
    out = torch.einsum("bhqk,bhkd->bhqd", powers / torch.where(dead, 1.0, total), v)
    lse = torch.where(dead, -math.inf, torch.log(torch.where(dead, 1.0, total)) + top).squeeze(-1)
    return out, lse


def packed(q, k, v, lens_q, lens_k, *, slopes=None, **options):
    """(out, log-sum-exp [Tq, H]) of packed [T, H, D] tensors: each sequence through `attention`."""
    outs, lses = [], []
    ends_q, ends_k = (tuple(pairwise((0, *accumulate(lens)))) for lens in (lens_q, lens_k))
    for row, ((a, b), (c, d)) in enumerate(zip(ends_q, ends_k, strict=True)):
        own = slopes[row] if slopes is not None and slopes.ndim == 2 else slopes
        parts = (t[None].transpose(1, 2) for t in (q[a:b], k[c:d], v[c:d]))
        out, lse = attention(*parts, slopes=own, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)
