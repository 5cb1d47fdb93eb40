"""Speculative decoding with a tree of candidates: several for each place, verified by one call of the target.

    decoder = TreeDecoder(draft, target, widths=(3, 2, 1), config=SpeculativeConfig(temperature=0.8))

Below each node the draft proposes as many children as its level's width says: its likeliest tokens at temperature 0,
else tokens drawn without replacement. The target is fed all nodes at once under `lz.tree_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

import layerzero as lz
from layerzero import sample
from layerzero.errors import InvalidInputError
from layerzero_models.speculative.decoder import CachedModel, Clock, SpeculativeConfig, SpeculativeDecoder, last_tokens


class TreeModel(CachedModel, Protocol):
    """A cached model that can be fed a tree."""

    def tree(self, ids: Tensor, lengths: Tensor, parents: Tensor) -> Tensor:
        """Logits [B, N, V] of nodes [B, N] that follow the first lengths[b] tokens of row b.

        Node i goes to place lengths[b] + i of the cache, stands at `lz.tree_positions(parents, lengths)` and attends
        what `lz.tree_mask(parents, lengths)` allows.
        """
        ...

    def keep(self, lengths: Tensor, path: Tensor) -> None:
        """Move the cache at lengths[b] + path[b, j] to lengths[b] + j, for every j before the first -1."""
        ...


def tree_of(widths: Sequence[int]) -> tuple[int, ...]:
    """The parents of a tree in which each node of level l has widths[l] children, level by level."""
    parents: list[int] = []
    level = [-1]
    for width in widths:
        begin = len(parents)
        parents.extend(node for node in level for _ in range(width))
        level = list(range(begin, len(parents)))
    return tuple(parents)


class TreeDecoder(SpeculativeDecoder):
    """`SpeculativeDecoder` over a tree. `config.draft_len` is the number of nodes, whatever it was given as."""

    draft: TreeModel
    target: TreeModel

    def __init__(
        self, draft: TreeModel, target: TreeModel, widths: Sequence[int], config: SpeculativeConfig | None = None
    ) -> None:
        if not widths or any(not isinstance(width, int) or width < 1 for width in widths):
            raise InvalidInputError("widths of a tree", code="VALUE_INVALID", value=str(widths), limit="1 or more each")
        self.widths = tuple(widths)
        self.parents = tree_of(widths)
        chosen = config if config is not None else SpeculativeConfig()
        super().__init__(draft, target, replace(chosen, draft_len=len(self.parents)))

    def _round(
        self, ids: Tensor, known: Tensor, recent: int, clock: Clock, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        parents = torch.tensor(self.parents, dtype=torch.int64)
        with clock.phase("draft"), self.scope("draft"):
            nodes, probs = self._grown(ids, known, recent, generator)
        with clock.phase("target"), self.scope("target"):
            fed = torch.cat((last_tokens(ids, known, 1), nodes.clamp(min=0)), dim=1)
            logits = self.target.tree(fed, known - 1, _below(1, parents))
        with clock.phase("verify"), self.scope("verify"):
            if self.config.greedy:
                tokens, kept, path = lz.sample_tree(nodes, None, logits, parents, greedy=True)
            else:
                target = self.config.probs(logits)
                tokens, kept, path = lz.sample_tree(nodes, probs, target, parents, generator=generator)
            # What the draft did not see of the path (its last node) is fed again at the next round.
            self.target.keep(known, path)
            self.draft.keep(known, path)
        return tokens, kept

    def _grown(
        self, ids: Tensor, known: Tensor, recent: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """The draft's tree: tokens [B, N], and what each was drawn from [B, N, V] (None for picked ones)."""
        trunk = last_tokens(ids, known, recent)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        level = 1  # nodes of the level above; at first the last token itself
        for width in self.widths:
            fed = torch.cat((trunk, *(item.clamp(min=0) for item in tokens)), dim=1)
            parents = torch.tensor(self.parents[: fed.shape[1] - recent], dtype=torch.int64)
            logits = self.draft.tree(fed, known - recent, _below(recent, parents))[:, -level:]
            if self.config.greedy:
                children = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
                # -1 where the vocabulary has fewer tokens than there are children
                tokens.append(pad(children, (0, width - children.shape[-1]), value=-1).flatten(1))
            else:
                found, rows = _without_replacement(self.config.probs(logits), width, generator)
                tokens.append(found.flatten(1))
                probs.append(rows.flatten(1, 2))
            level *= width
        return torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if probs else None


def _below(trunk: int, parents: Tensor) -> Tensor:
    """The parents of a tree that grows from the end of a chain of `trunk` tokens fed with it."""
    return torch.cat((torch.arange(-1, trunk - 1), parents + trunk))


def _without_replacement(probs: Tensor, width: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """`width` different tokens of each row [B, F, V], -1 where there are no more, and what each was drawn from."""
    tokens, rows = [], []
    left = probs
    for _ in range(width):
        drawn = sample(left.flatten(0, 1).log(), generator=generator).reshape(left.shape[:2]).unsqueeze(-1)
        tokens.append(drawn)
        rows.append(left.unsqueeze(2))
        left = left.scatter(-1, drawn.clamp(min=0), 0.0)
    return torch.cat(tokens, dim=-1), torch.cat(rows, dim=2)
