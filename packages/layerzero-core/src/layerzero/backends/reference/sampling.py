"""Sampling one token per row of logits [B, V], and the distribution it is drawn from.

Tokens are ranked by logit, the lower id first among equals, and every filter keeps a prefix of that ranking. Order of
the filters: temperature, top-k, top-p (of the mass that top-k left), min-p (relative to the likeliest). The likeliest
token always stays. Temperature 0 takes it outright.

The draw takes one uniform float64 a row and walks the kept tokens in the order of their ids until the cumulative
weight exceeds that share of the total. So equal parameters, given as a number or as a tensor, draw the same token from
the same generator state; a kernel that finds the kept tokens in another way draws it too; and a parameter tensor never
makes the host wait for the device.

Logits need not be finite: -inf bans a token; tokens at +inf share all the mass. A row with a NaN, or with nothing but
-inf, has no distribution: its token is -1 and its probabilities are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Param = float | Tensor
Kept = tuple[Tensor, Tensor | None]
"""Weights of tokens in the order of their ids, and these ids; None: of all tokens."""

# Mass this close to p counts as reached: sums of the same numbers in another order must not keep another token.
SLACK = 1e-9


def one_filter(sample: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`sample` with top-k alone, and with top-p alone: (logits, k or p, temperature, generator)."""

    def topk(logits: Tensor, k: int | Tensor, *rest: Any) -> Tensor:
        return sample(logits, k, None, None, *rest)

    def topp(logits: Tensor, p: Param, *rest: Any) -> Tensor:
        return sample(logits, None, p, None, *rest)

    return topk, topp


def sample(
    logits: Tensor,
    top_k: int | Tensor | None,
    top_p: Param | None,
    min_p: Param | None,
    temperature: Param,
    generator: torch.Generator | None,
    *,
    find: Callable[..., Kept] | None = None,
) -> Tensor:
    """Draw with all filters at once. None, and top_k <= 0, leave a filter out. Returns int64 [B].

    `find` finds the kept tokens in another way than `kept`.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        return greedy(logits)
    weights, ids = (find or kept)(logits, top_k, top_p, min_p, temperature)
    index = draw(weights, draw_uniform(weights, 1, generator))
    drawn = (index if ids is None else torch.where(index < 0, -1, ids.gather(1, index.clamp(min=0)))).squeeze(1)
    if not isinstance(temperature, Tensor):
        return drawn
    return torch.where(temperature.to(drawn.device) > 0, drawn, greedy(logits))


sample_topk, sample_topp = one_filter(sample)


def sampling_probs(
    logits: Tensor,
    top_k: int | Tensor | None,
    top_p: Param | None,
    min_p: Param | None,
    temperature: Param,
    *,
    find: Callable[..., Kept] | None = None,
) -> Tensor:
    """The probabilities `sample` draws with, [B, V]; float64 for float64 logits, else float32."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    certain = None
    if isinstance(temperature, Tensor) or temperature <= 0:
        head = greedy(logits).unsqueeze(1)
        certain = (torch.arange(logits.shape[-1], device=logits.device) == head).to(dtype)
        if not isinstance(temperature, Tensor):
            return certain
    weights, ids = (find or kept)(logits, top_k, top_p, min_p, temperature)
    total = weights.sum(dim=-1, keepdim=True)
    probs = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0).to(dtype)
    if ids is not None:
        probs = torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter(1, ids, probs)
    if certain is None:
        return probs
    assert isinstance(temperature, Tensor)
    return torch.where(temperature.to(probs.device).unsqueeze(1) > 0, probs, certain)


def probs_of_rows(logits: Tensor, *params: Any) -> Tensor:
    """`sampling_probs` of logits of any rank; a parameter has one value a row, or one an entry of the first axis."""
    lead = logits.shape[:-1]

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.reshape(value.shape + (1,) * (len(lead) - value.dim())).expand(lead).reshape(-1)

    return sampling_probs(logits.flatten(0, -2), *(spread(item) for item in params)).reshape(logits.shape)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id among equals; -1 where there is none."""
    ids = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, ids) > -math.inf, ids, -1).squeeze(-1)  # argmax takes a NaN for the largest


def tempered(ordered: Tensor, head: Tensor, temperature: Param) -> Tensor:
    """Weights exp((logit - head) / temperature), not normalised; `head` is the row's largest logit.

    Rows at temperature 0 are computed at 1 (and not used).
    """
    # A tiny temperature then sends the tail to -inf, never the head to +inf; inf - inf counts as no distance.
    shifted = torch.where(ordered == head, 0.0, ordered - head)
    if isinstance(temperature, Tensor):
        given = column(temperature, shifted)
        weights = torch.exp(shifted / torch.where(given > 0, given, 1.0))
    else:
        weights = torch.exp(shifted / temperature)
    return torch.where(head > -math.inf, weights, 0.0)


def draw_uniform(weights: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers [B, count], in the type of the weights, on their device."""
    device = weights.device if generator is None else generator.device
    drawn = torch.rand((weights.shape[0], count), generator=generator, device=device, dtype=weights.dtype)
    return drawn.to(weights.device)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [B, 1] of the first entry whose cumulative weight exceeds a uniform share of the total; -1 without any."""
    cdf = weights.cumsum(dim=-1).contiguous()
    total = cdf[:, -1:].contiguous()
    # Rounding must not carry the target up to the total, where no entry would exceed it.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    return torch.where(total > 0, index, -1)


def kept(
    logits: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None, temperature: Param
) -> Kept:
    """Weights [B, V] of the tokens that the filters keep, zero for the others."""
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    if isinstance(top_k, int) and 0 < top_k < logits.shape[-1]:
        values, ids = values[:, :top_k], ids[:, :top_k]
    # The wide type is not a luxury: float32 cannot resolve the tail of a large vocabulary.
    values = values.to(wide(logits))
    weights = tempered(values, values[:, :1], temperature)
    keep = filtered(weights, top_k, top_p, min_p)
    room = torch.zeros(logits.shape, dtype=weights.dtype, device=weights.device)
    return room.scatter(1, ids, weights * keep), None


def wide(like: Tensor) -> torch.dtype:
    """float64; MPS has none."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def filtered(weights: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None) -> Tensor:
    """Which of the ranked weights, likeliest first, the filters keep."""
    keep = torch.ones_like(weights, dtype=torch.bool)
    if top_k is not None:
        limit = column(top_k, weights)
        rank = torch.arange(weights.shape[-1], device=weights.device)
        keep = keep & ((rank < limit) | (limit <= 0))
    if top_p is not None:
        share = column(top_p, weights)
        left = weights * keep
        before = left.cumsum(dim=-1) - left
        goal = (share - SLACK) * left.sum(dim=-1, keepdim=True)
        keep = keep & ((before < goal) | (share >= 1))  # p = 1 keeps all
    if min_p is not None:
        keep = keep & (weights >= column(min_p, weights) * weights[:, :1])
    keep[:, 0] = True
    return keep


def column(value: Param, like: Tensor) -> Tensor:
    """A parameter as [B, 1] (or a 0-d tensor made on the device, without a copy from the host)."""
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=like.dtype).reshape(-1, 1)
    return torch.full((), value, device=like.device, dtype=like.dtype)
