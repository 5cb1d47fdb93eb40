"""Sampling one token per row of logits [B, V].

All three functions sort the candidates by probability, keep a prefix, and pick from it by inverting the cumulative
distribution with one uniform number per row. So equal parameters, given as a number or as a tensor, draw the same
token from the same generator state; and a parameter tensor never makes the host wait for the device.

Order of the filters: temperature, top-k, top-p (of the mass that top-k left), min-p (relative to the likeliest).
The likeliest token always stays. Temperature 0 takes it outright. Among equal logits the lower id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sample", "sample_topk", "sample_topp"]

Param = float | Tensor


def sample_topk(logits: Tensor, k: int | Tensor, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the k likeliest tokens of each row."""
    return sample(logits, k, None, None, temperature, generator)


def sample_topp(logits: Tensor, p: Param, temperature: Param, generator: torch.Generator | None) -> Tensor:
    """Draw from the smallest set of likeliest tokens whose probabilities reach p."""
    return sample(logits, None, p, None, temperature, generator)


def sample(
    logits: Tensor,
    top_k: int | Tensor | None,
    top_p: Param | None,
    min_p: Param | None,
    temperature: Param,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw with all filters at once. None, and top_k <= 0, leave a filter out. Returns int64 [B]."""
    if not isinstance(temperature, Tensor) and temperature <= 0:
        return logits.argmax(dim=-1)
    ordered, token_ids = _sorted(logits, top_k)
    probs = _tempered(ordered, temperature)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k is not None:
        limit = _column(top_k, probs)
        rank = torch.arange(probs.shape[-1], device=probs.device)
        keep = keep & ((rank < limit) | (limit <= 0))
        probs = _renormalised(probs, keep)
    if top_p is not None:
        mass = _column(top_p, probs)
        before = probs.cumsum(dim=-1) - probs
        keep = keep & ((before < mass) | (mass >= 1))  # p = 1 keeps all, whatever the rounding of the sum
    if min_p is not None:
        keep = keep & (probs >= _column(min_p, probs) * probs[:, :1])
    keep[:, 0] = True
    drawn = token_ids.gather(1, _invert_cdf(probs * keep, keep, generator)).squeeze(1)
    if not isinstance(temperature, Tensor):
        return drawn
    return torch.where(temperature.to(drawn.device) > 0, drawn, token_ids[:, 0])


def _sorted(logits: Tensor, top_k: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits in float64 and token ids, likeliest first. With a plain k the tail is cut off."""
    # The wide type is not a luxury: float32 cannot resolve the tail of a large vocabulary. (MPS has no float64.)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    if isinstance(top_k, int) and 0 < top_k < logits.shape[-1]:
        values, ids = values[:, :top_k], ids[:, :top_k]
    return values.to(wide), ids


def _tempered(ordered: Tensor, temperature: Param) -> Tensor:
    """Softmax of sorted logits at a temperature; rows at temperature 0 are left as they are (and not used)."""
    shifted = ordered - ordered[:, :1]  # a tiny temperature then sends the tail to -inf, never the head to +inf
    if isinstance(temperature, Tensor):
        column = _column(temperature, shifted)
        return torch.softmax(shifted / torch.where(column > 0, column, 1.0), dim=-1)
    return torch.softmax(shifted / temperature, dim=-1)


def _renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    kept = probs * keep
    return kept / kept.sum(dim=-1, keepdim=True)


def _invert_cdf(weights: Tensor, keep: Tensor, generator: torch.Generator | None) -> Tensor:
    """Index [B, 1] of the first entry whose cumulative weight exceeds a uniform share of the total."""
    cdf = weights.cumsum(dim=-1).contiguous()
    device = weights.device if generator is None else generator.device
    uniform = torch.rand((weights.shape[0], 1), generator=generator, device=device, dtype=weights.dtype)
    target = uniform.to(weights.device) * cdf[:, -1:]
    last = keep.sum(dim=-1, keepdim=True) - 1  # rounding must not carry the draw past the kept prefix
    return torch.minimum(torch.searchsorted(cdf, target, right=True), last)


def _column(value: Param, like: Tensor) -> Tensor:
    """A parameter as [B, 1] (or a 0-d tensor made on the device, without a copy from the host)."""
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=like.dtype).reshape(-1, 1)
    return torch.full((), value, device=like.device, dtype=like.dtype)
