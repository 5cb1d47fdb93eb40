"""Sampling without a sort of the vocabulary.

Same tokens as the reference for the same generator state: the kept tokens, their weights and the order of the draw are
the reference's; only the way to the kept tokens differs.

* top-k needs the k largest and nothing else.
* min-p alone, and no filter at all, need no ranking: a threshold on the weights says it all.
* top-p needs to know only how the tokens around the cut rank: the mass is summed up in buckets of like weight, and the
  one bucket in which it reaches p is sorted.

The last, and one k a row, look at numbers before they go on, which is free on the CPU only: elsewhere the reference
sorts.

On an accelerator launches cost more than arithmetic: `sample_sorted` and its kin sort once, as a torch user would, with
a third of the reference's launches, and draw by a race of exponential clocks: another token than the reference's for
the same generator state, from the same distribution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.reference import sampling as reference
from layerzero.backends.reference.precision import number

Param = float | Tensor

_BUCKETS = 2048  # of weights, each a factor of 2**(1/64) below the one before; the last holds the rest
_SMALL = 4096  # a vocabulary that is sorted as fast


def sample(*args: Any) -> Tensor:
    """Draw with all filters at once; the arguments are the reference's."""
    return reference.sample(*args, find=_kept)


sample_topk, sample_topp = reference.one_filter(sample)


def sampling_probs(
    logits: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None, temperature: Param
) -> Tensor:
    """The probabilities `sample` draws with; ranked by one sort where `sample_sorted` is the quicker one, too."""
    certain = not isinstance(temperature, Tensor) and temperature <= 0
    if certain or (logits.device.type == "cpu" and logits.shape[-1] >= _SMALL):
        return reference.sampling_probs(logits, top_k, top_p, min_p, temperature, find=_kept)
    weights, ids, hot = _ranked(logits, top_k, top_p, min_p, temperature)
    if hot is not None:  # a row at temperature 0 has its likeliest token alone, or a NaN where it has no distribution
        first = torch.arange(weights.shape[-1], device=weights.device) == 0
        weights = torch.where(hot | weights.isnan(), weights, first)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    probs = torch.empty_like(weights, dtype=dtype)
    torch.div(weights, weights.sum(dim=-1, keepdim=True), out=probs).nan_to_num_(nan=0.0)
    return torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter_(1, ids, probs)


def sample_sorted(logits: Tensor, *options: Any) -> Tensor:
    """One stable sort of the vocabulary, filters on the ranking, one draw; the host never waits for the device."""
    top_k, top_p, min_p, temperature, generator = options
    if not isinstance(temperature, Tensor) and temperature <= 0:
        return reference.greedy(logits)
    weights, ids, hot = _ranked(logits, top_k, top_p, min_p, temperature)
    clocks = torch.empty_like(weights, device=None if generator is None else generator.device)
    clocks = clocks.exponential_(generator=generator).to(logits.device)
    drawn = ids.gather(1, weights.div_(clocks).argmax(dim=-1, keepdim=True))
    if hot is not None:
        drawn = torch.where(hot, drawn, ids[:, :1])  # the likeliest, the lower id first among equals
    return drawn.masked_fill_(weights[:, :1].isnan(), -1).squeeze(1)


sample_topk_sorted, sample_topp_sorted = reference.one_filter(sample_sorted)


def _ranked(
    logits: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None, temperature: Param
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights, the likeliest first, zero for what the filters leave out, NaN in a row without a distribution; their
    ids; and, where they differ, which rows have a temperature above 0."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    if isinstance(top_k, int) and 0 < top_k < logits.shape[-1]:
        values, ids = values[:, :top_k], ids[:, :top_k]
    # Widened by the other's dtype, in one launch; tokens at +inf share the whole mass.
    dtype = reference.wide(logits)
    wide = torch.minimum(values, number(torch.finfo(dtype).max, logits, dtype, 1))
    hot = None
    if isinstance(temperature, Tensor):
        column = reference.column(temperature, wide)
        hot = column > 0
        temperature = torch.where(hot, column, 1.0)
    if isinstance(temperature, Tensor) or temperature != 1.0:
        wide = (wide - wide[:, :1]).div_(temperature)
    weights = torch.softmax(wide, -1)
    if isinstance(top_k, Tensor):
        limit = top_k.to(logits.device).reshape(-1, 1)
        rank = torch.arange(weights.shape[-1], device=logits.device)
        weights = weights.masked_fill_((rank >= limit) & (limit > 0), 0.0)
    if isinstance(top_p, Tensor) or (top_p is not None and top_p < 1):
        _leave_out(weights, top_p, isinstance(top_k, Tensor))
    if min_p is not None:
        least = reference.column(min_p, weights).clamp(max=1) if isinstance(min_p, Tensor) else min(min_p, 1.0)
        weights = weights.masked_fill_(weights < weights[:, :1] * least, 0.0)
    return weights, ids, hot


def _leave_out(weights: Tensor, top_p: Param, cut: bool) -> None:
    """Make zeros of what lies beyond the smallest set that reaches top_p, never of the likeliest.

    The weights add up to 1, unless some were `cut` off.
    """
    mass, least = weights.cumsum(dim=-1), torch.finfo(weights.dtype).tiny
    share = reference.column(top_p, weights) if isinstance(top_p, Tensor) else top_p
    goal = (share - reference.SLACK) * (mass[:, -1:] if cut else 1.0)
    goal = goal.clamp_(min=least) if isinstance(goal, Tensor) else max(goal, least)
    beyond = mass[:, :-1] >= goal
    weights[:, 1:].masked_fill_(beyond & (share < 1) if isinstance(share, Tensor) else beyond, 0.0)


def _kept(
    logits: Tensor, top_k: int | Tensor | None, top_p: Param | None, min_p: Param | None, temperature: Param
) -> reference.Kept:
    """Weights of the kept tokens in the order of ids, and those ids (None: all of them); by a sort only if need be."""
    given = (logits, top_k, top_p, min_p, temperature)
    vocab = logits.shape[-1]
    if isinstance(top_k, int) and not 0 < top_k < vocab:
        top_k = None
    if not isinstance(top_p, Tensor) and top_p is not None and top_p >= 1:
        top_p = None
    if top_k is not None:
        head = top_k
        if isinstance(head, Tensor):  # the largest k of all rows; 0 where that cannot be used
            usable = logits.is_cpu and head.is_cpu and head.numel() and int(head.min()) > 0
            head = int(head.max()) if usable else 0
        if not 0 < head < vocab:
            return reference.kept(*given)
        values, ids = _head(logits, head)
        weights = reference.tempered(values, values[:, :1], temperature)
        keep = reference.filtered(weights, top_k if isinstance(top_k, Tensor) else None, top_p, min_p)
        ids, order = ids.sort(dim=-1)
        return (weights * keep).gather(1, order), ids
    if top_p is None:
        weights = _weights(logits, temperature)
    elif logits.device.type == "cpu" and vocab >= _SMALL and bool(logits.amax(dim=-1).isfinite().all()):
        weights = _nucleus(logits, top_p, temperature)
    else:
        return reference.kept(*given)
    if min_p is not None:
        weights = torch.where(weights >= reference.column(min_p, weights).clamp(max=1), weights, 0.0)
    return weights, None


def _weights(logits: Tensor, temperature: Param) -> Tensor:
    """The reference's weights of every token, [B, V]; the likeliest has 1."""
    wide = logits.to(reference.wide(logits), copy=True)
    top = wide.amax(dim=-1, keepdim=True)
    if logits.device.type != "cpu" or not bool(top.isfinite().all()):
        return reference.tempered(wide, top, temperature)
    if isinstance(temperature, Tensor):
        column = reference.column(temperature, wide)
        return wide.sub_(top).div_(torch.where(column > 0, column, 1.0)).exp_()
    return wide.sub_(top).div_(temperature).exp_()


def _nucleus(logits: Tensor, top_p: Param, temperature: Param) -> Tensor:
    """The weights without those beyond the smallest set that reaches top_p."""
    weights = _weights(logits, temperature)
    bucket = _buckets(logits, temperature)
    sums = torch.zeros(len(weights), _BUCKETS, dtype=weights.dtype).scatter_add_(1, bucket, weights)
    mass = sums.cumsum(dim=-1)
    shares = reference.column(top_p, weights).expand(len(weights), 1)
    goals = ((shares - reference.SLACK) * mass[:, -1:]).contiguous()
    crossings = torch.searchsorted(mass, goals).clamp_(max=_BUCKETS - 1)
    crossings = torch.where(shares >= 1, _BUCKETS, crossings)  # p = 1 keeps all
    beyond = bucket >= crossings
    for row, place in enumerate(crossings.squeeze(1).tolist()):
        if place == _BUCKETS:
            continue
        ids = (bucket[row] == place).nonzero().squeeze(1)  # ascending
        ids = ids[logits[row, ids].sort(descending=True, stable=True).indices]
        inside = weights[row, ids]
        before = inside.cumsum(0) - inside + (mass[row, place] - sums[row, place])
        count = int((before < goals[row]).sum())
        beyond[row, ids[: max(count, int(place == 0))]] = False  # the likeliest stays
    return weights.masked_fill_(beyond, 0.0)


def _buckets(logits: Tensor, temperature: Param) -> Tensor:
    """The bucket of each token: the same for equal logits, and never lower for a smaller one."""
    narrow = logits if logits.dtype == torch.float64 else logits.float()
    step = 64.0 / math.log(2.0) / reference.column(temperature, narrow)
    step = torch.where(step > 0, step, 1.0).clamp_(max=1e30)  # no 0 * inf at a tiny temperature
    distance = narrow.amax(dim=-1, keepdim=True) - narrow
    return distance.mul_(step).clamp_(max=_BUCKETS - 1).long()


def _head(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` of the ranking: wide values and ids, the lower id first among equals."""
    vocab = logits.shape[-1]
    more = min(count + 1, vocab)
    values, ids = logits.topk(more, dim=-1)
    cut = values[:, count - 1 : count]
    # torch.topk takes any of several equal logits. Where the cut goes through equals, the lowest ids are looked for;
    # on an accelerator always, since asking would make the host wait.
    if logits.device.type != "cpu" or (more > count and not bool((cut > values[:, count:]).all())):
        above = (~(values[:, :count] <= cut)).sum(dim=-1, keepdim=True)  # a NaN is above, as it is to torch.topk
        every = torch.arange(vocab, device=logits.device, dtype=torch.int32)
        equals = -torch.where(logits == cut, -every, -vocab).topk(count, dim=-1).values.long()
        place = torch.arange(count, device=logits.device).expand_as(equals)
        shifted = equals.gather(1, (place - above).clamp(min=0))
        ids = torch.where(place < above, ids[:, :count], shifted.clamp(max=vocab - 1))
    else:
        ids = ids[:, :count]
    ids = ids.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values.to(reference.wide(logits)), ids.gather(1, order)
