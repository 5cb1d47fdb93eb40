"""Sampling among the k likeliest tokens, found by FlashInfer's radix selection instead of a sort of the vocabulary.

The tokens that stay, their weights and the draw are those of the op: of equal logits the lower id ranks first, exactly
k stay, and equal generator states give the tokens that the built-in kernels draw. FlashInfer's own samplers are not
used: they keep every token that equals the last one kept, and draw by rejection, so neither holds for them. For the
same reason there is no kernel for top-p alone.

The selection shares one buffer of row states for all streams of a device; calls of different streams are put in order.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.reasons import Reason, reason
from layerzero_flashinfer.vendor import lib

__all__ = ["needs_top_k", "sample", "sample_topk", "sampling_probs"]

_SLACK = 1e-9  # mass this close to p counts as reached, as the op has it


def needs_top_k(ctx: Context) -> list[Reason]:
    """A predicate: without a k there is nothing to select."""
    if ctx.op == "sample_topk" or "sample_top_k" in ctx.needs:
        return []
    return [reason("FEATURE_UNSUPPORTED", "sampling without top_k")]


def sample_topk(logits: Tensor, k: int, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Draw from the k likeliest tokens of each row."""
    return sample(logits, k, None, None, temperature, generator)


def sample(
    logits: Tensor,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Temperature, top-k, top-p of what is left, min-p, one draw a row."""
    if temperature <= 0:
        return _greedy(logits)
    weights, ids = _kept(logits, top_k, top_p, min_p, temperature)
    device = logits.device if generator is None else generator.device
    uniform = torch.rand((logits.shape[0], 1), generator=generator, device=device, dtype=weights.dtype)
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:].contiguous()
    # Rounding must not carry the target up to the total, where no entry would exceed it.
    target = torch.minimum(uniform.to(logits.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    return torch.where(total > 0, ids.gather(1, index), -1).squeeze(1)


def sampling_probs(
    logits: Tensor, top_k: int | None, top_p: float | None, min_p: float | None, temperature: float
) -> Tensor:
    """The probabilities `sample` draws with, float32 [B, V]."""
    room = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    if temperature <= 0:
        best = _greedy(logits).unsqueeze(1)
        return room.scatter_(1, best.clamp(min=0), (best >= 0).float())
    weights, ids = _kept(logits, top_k, top_p, min_p, temperature)
    total = weights.sum(dim=-1, keepdim=True)
    return room.scatter_(1, ids, torch.where(total > 0, weights / total, 0.0).float())


def _greedy(logits: Tensor) -> Tensor:
    ids = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, ids) > -math.inf, ids, -1).squeeze(-1)  # argmax takes a NaN for the largest


def _kept(
    logits: Tensor, top_k: int | None, top_p: float | None, min_p: float | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Weights of the kept tokens in the order of their ids, zero for those the other filters take out."""
    count = logits.shape[-1] if top_k is None or top_k <= 0 else min(top_k, logits.shape[-1])
    ids = _head(logits, count)  # ascending
    values, rank = logits.gather(1, ids).to(torch.float64).sort(dim=-1, descending=True, stable=True)
    best = values[:, :1]
    weights = torch.exp(torch.where(values == best, 0.0, values - best) / temperature)
    # A row with a NaN, or with nothing but -inf, has no distribution.
    weights = torch.where((best > -math.inf) & ~logits.isnan().any(dim=-1, keepdim=True), weights, 0.0)
    keep = torch.ones_like(weights, dtype=torch.bool)
    if top_p is not None and top_p < 1:
        before = weights.cumsum(dim=-1) - weights
        keep &= before < (top_p - _SLACK) * weights.sum(dim=-1, keepdim=True)
    if min_p is not None:
        keep &= weights >= min_p * weights[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, rank, weights * keep), ids


def _head(logits: Tensor, count: int) -> Tensor:
    """Ids of the first `count` of the ranking, ascending; of equal logits the lower ids."""
    if count == logits.shape[-1]:
        return torch.arange(count, device=logits.device).expand(logits.shape[0], count)
    values, ids = _select(logits, count)
    cut = values.amin(dim=-1, keepdim=True)
    above = values > cut
    # Those that equal the cut may be any; the lowest ids among all equals are selected in their place.
    every = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)  # exact up to 2**24 tokens
    equal_values, equals = _select(torch.where(logits == cut, -every, -math.inf), count)
    equals = torch.where(equal_values > -math.inf, equals, logits.shape[-1]).sort(dim=-1).values
    wanted = (~above).cumsum(dim=-1) - 1
    filled = torch.where(above, ids, equals.gather(1, wanted.clamp(min=0)).clamp(max=logits.shape[-1] - 1))
    return filled.sort(dim=-1).values


class _Order:
    """Calls of one device, one stream after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: tuple[Any, Any] | None = None


_orders: dict[int, _Order] = {}


def _select(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    order = _orders.setdefault(values.get_device(), _Order())
    with order.lock:
        if not values.is_cuda:
            return lib().top_k(values, count)  # type: ignore[no-any-return]
        stream = torch.cuda.current_stream(values.device)
        if order.last is not None and order.last[0] != stream:
            stream.wait_event(order.last[1])
        found: tuple[Tensor, Tensor] = lib().top_k(values, count)
        order.last = (stream, stream.record_event())
        return found
