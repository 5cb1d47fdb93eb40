"""Verification of drafted tokens: which of them the target model keeps, and the token after them.

A candidate x that was drawn from q is kept with probability min(1, p(x) / q(x)), p being what the target would draw
from. If it is not kept, p becomes the normalised positive part of p - q, and the next candidate for the same place is
judged against that, or, when there is none left, the token is drawn from it. Whatever q is, the tokens that come out
are distributed as the target's own: the share of x that q brings beyond p is exactly what the residual lacks.

Every row takes one uniform float64 per candidate and one for the last token, used or not. So what one row draws does
not depend on its neighbours, and a chain gives the same tokens through both functions.

Probabilities are weights: rows are normalised here. A target row without mass, or with a NaN, gives the token -1. What
its own q gives no mass cannot have been drawn from it and is no candidate, nor is an id outside of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from layerzero.backends.reference.sampling import draw, draw_uniform, greedy
from layerzero.backends.reference.sampling import wide as wide_of


def sample_speculative(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    greedily: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Judge a chain of L candidates: tokens [B, L+1], filled up with -1, and how many candidates were kept [B]."""
    if greedily:
        return _greedy_chain(draft_ids, target_probs)
    return judge_chain(draft_ids, draft_probs, target_probs, _uniforms(draft_ids, wide_of(target_probs), generator))


def sample_tree(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    parents: Tensor,
    greedily: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge a tree of N candidates: tokens [B, N+1], their number [B], and the nodes of the kept path [B, N].

    Siblings are judged in the order of their indices.
    """
    uniform = None if greedily else _uniforms(draft_ids, wide_of(target_probs), generator)
    return judge_tree(draft_ids, draft_probs, target_probs, parents, uniform)


def judge_chain(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """`sample_speculative` for given uniform numbers [B, L+1]: the last one draws the token after the kept ones."""
    batch, length = draft_ids.shape
    vocab = target_probs.shape[-1]
    real, ids = _candidates(draft_ids, vocab)
    wide = uniform.dtype
    # What was kept: only the probabilities of the candidates themselves are needed, and the sums of their rows.
    p = _share(target_probs[:, :length], ids, wide)
    q = torch.ones_like(p) if draft_probs is None else _share(draft_probs, ids, wide)
    real = real & (q > 0)
    kept = real & (uniform[:, :length] * q < p)
    count = kept.long().cumprod(dim=1).sum(dim=1)
    # The token after them: one row of each distribution.
    rows = torch.arange(batch, device=draft_ids.device)
    left = _normalised(target_probs[rows, count].to(wide))
    if length > 0:
        place = count.clamp(max=length - 1)
        refused = (count < length) & real[rows, place]
        left = torch.where(
            refused.unsqueeze(1), _residual(left, _proposal(draft_probs, ids, place, rows, vocab, wide)), left
        )
    last = draw(left, uniform[:, length:])
    return _chain(draft_ids, count, last), count


def judge_tree(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, parents: Tensor, uniform: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_tree` for given uniform numbers [B, N+1]; None judges greedily."""
    batch, nodes = draft_ids.shape
    vocab = target_probs.shape[-1]
    real, ids = _candidates(draft_ids, vocab)
    wide = wide_of(target_probs) if uniform is None else uniform.dtype
    parents = parents.to(draft_ids.device).expand(batch, nodes)
    rows = torch.arange(batch, device=draft_ids.device)
    tokens = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=draft_ids.device)
    path = torch.full((batch, nodes), -1, dtype=torch.int64, device=draft_ids.device)
    count = torch.zeros(batch, dtype=torch.int64, device=draft_ids.device)
    node = torch.full_like(count, -1)
    left = _standing(target_probs[:, 0], uniform, wide)
    # A parent comes before its children, so one walk over the nodes meets each row's path in order.
    for i in range(nodes):
        here = real[:, i] & (parents[:, i] == node)
        x = ids[:, i]
        if uniform is None:
            kept = here & (left.squeeze(1) == x)
        else:
            q = _proposal(draft_probs, ids, torch.full_like(count, i), rows, vocab, wide)
            here = here & (q[rows, x] > 0)
            kept = here & (uniform[:, i] * q[rows, x] < left[rows, x])
            left = torch.where((here & ~kept).unsqueeze(1), _residual(left, q), left)
        left = torch.where(kept.unsqueeze(1), _standing(target_probs[:, i + 1], uniform, wide), left)
        tokens[rows, count] = torch.where(kept, x, tokens[rows, count])
        path[rows, count.clamp(max=nodes - 1)] = torch.where(kept, i, path[rows, count.clamp(max=nodes - 1)])
        node = torch.where(kept, i, node)
        count = count + kept.long()
    last = left if uniform is None else draw(left, uniform[:, nodes:])
    tokens[rows, count] = last.squeeze(1)
    return tokens, count, path


def _greedy_chain(draft_ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Keep candidates as long as they are the target's likeliest tokens."""
    most, best = target.max(dim=-1)  # the first of equals; a NaN is the largest
    sure = most > -math.inf
    kept = (draft_ids == best[:, :-1]).logical_and_(sure[:, :-1])
    chain = kept.cumprod(dim=1)
    sure[:, 1:].logical_and_(chain)  # what was kept is the likeliest, so one row of tokens holds it all
    return best.masked_fill_(sure.logical_not_(), -1), chain.sum(dim=1)


def _chain(draft_ids: Tensor, count: Tensor, last: Tensor) -> Tensor:
    """The kept candidates, the token after them, and -1 to the end."""
    place = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    room = torch.cat((draft_ids.long(), last), dim=1)
    after = torch.where(place == count.unsqueeze(1), last, -1)
    return torch.where(place < count.unsqueeze(1), room, after)


def _candidates(draft_ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Which ids are tokens, and ids that can be looked up."""
    return (draft_ids >= 0) & (draft_ids < vocab), draft_ids.long().clamp(0, vocab - 1)


def _standing(row: Tensor, uniform: Tensor | None, wide: torch.dtype) -> Tensor:
    """What candidates are judged against: the target's distribution [B, V], or its likeliest token [B, 1]."""
    return greedy(row).unsqueeze(1) if uniform is None else _normalised(row.to(wide))


def _share(probs: Tensor, ids: Tensor, wide: torch.dtype) -> Tensor:
    """Probability of one id in each row of [B, L, V]."""
    total = probs.sum(dim=-1, dtype=wide)
    found = probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).to(wide)
    return torch.where(total > 0, found / torch.where(total > 0, total, 1.0), 0.0)


def _proposal(
    draft_probs: Tensor | None, ids: Tensor, place: Tensor, rows: Tensor, vocab: int, wide: torch.dtype
) -> Tensor:
    """What the candidate at `place` of each row was drawn from, [B, V]; all on the candidate where it was picked."""
    if draft_probs is not None:
        return _normalised(draft_probs[rows, place].to(wide))
    return (torch.arange(vocab, device=ids.device) == ids[rows, place].unsqueeze(1)).to(wide)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """The normalised positive part of p - q; p itself where rounding leaves nothing of it."""
    left = (p - q).clamp(min=0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / torch.where(total > 0, total, 1.0), p)


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0)


def _uniforms(draft_ids: Tensor, wide: torch.dtype, generator: torch.Generator | None) -> Tensor:
    like = torch.empty((draft_ids.shape[0], 0), dtype=wide, device=draft_ids.device)
    return draw_uniform(like, draft_ids.shape[1] + 1, generator)
