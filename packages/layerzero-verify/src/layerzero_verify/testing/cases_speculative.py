"""Cases of sampling probabilities and of speculative verification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, group

__all__ = ["ROWS"]

Pairs = Iterator[tuple[str, Maker]]

ROWS = 6000  # of one and the same distribution, so that their tokens can be counted
_VOCAB, _LENGTH = 7, 2
_PARENTS = (-1, -1, 0, 0, 1)


# -- probabilities -----------------------------------------------------------------------------------
def _logits(draw: Draw) -> Tensor:
    # Distinct logits, also in the narrow types: a tie would let two right kernels differ.
    steps = draw.permutation(61, torch.float32) - 30
    return (steps / 8 + torch.arange(5, device=draw.device)[:, None] / 4).to(draw.dtype)


def _probs(label: str, *requires: str, **given: Any) -> None:
    @group("result", "sampling_probs", *requires, every_dtype=True)
    def _cases(spec: KernelSpec) -> Pairs:
        def make(draw: Draw) -> tuple[Any, ...]:
            params = {
                name: torch.tensor(value, device=draw.device) if isinstance(value, list) else value
                for name, value in given.items()
            }
            names = ("top_k", "top_p", "min_p")
            return _logits(draw), *(params.get(name) for name in names), params.get("temperature", 0.7)

        yield label, make


_probs("plain")
_probs("greedy", temperature=0.0)
_probs("top_k", "sample_top_k", top_k=5)
_probs("top_p", "sample_top_p", top_p=0.8)
_probs("min_p", "sample_min_p", min_p=0.05)
_probs("together", "sample_top_k", "sample_top_p", "sample_min_p", top_k=9, top_p=0.95, min_p=0.01)
_probs(
    "by_row",
    "tensor_params",
    "mixed_weight",
    "sample_top_k",
    "sample_top_p",
    top_k=[1, 3, 61, 9, 40],
    top_p=[0.5, 0.9, 0.7, 1.0, 0.99],
    temperature=[0.7, 1.0, 2.0, 0.0, 0.3],
)


# -- verification ------------------------------------------------------------------------------------
def _distributions(draw: Draw, places: int) -> Tensor:
    """[places, V], none of the probabilities small."""
    return torch.softmax(draw.normal(places, _VOCAB).float(), dim=-1).to(draw.dtype)


def _drawn(draw: Draw, probs: Tensor) -> Tensor:
    """ROWS draws from each of [places, V]."""
    uniform = draw.integers(2**24, probs.shape[0], ROWS).double() / 2**24
    cdf = probs.double().cumsum(dim=-1)
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp(max=_VOCAB - 1).T.contiguous()


def _generator(draw: Draw) -> torch.Generator:
    return torch.Generator(draw.device).manual_seed(7)


def _chain(draw: Draw, *, picked: bool = False) -> tuple[Any, ...]:
    """Equal rows whose target does not depend on the tokens before, so that each place has one known distribution."""
    target, draft = _distributions(draw, _LENGTH + 1), _distributions(draw, _LENGTH)
    ids = draw.integers(_VOCAB, _LENGTH).expand(ROWS, -1).contiguous() if picked else _drawn(draw, draft)
    rows = None if picked else draft.expand(ROWS, -1, -1).contiguous()
    return ids, rows, target.expand(ROWS, -1, -1).contiguous(), False, _generator(draw)


def _tree(draw: Draw, *, picked: bool = False) -> tuple[Any, ...]:
    """As `_chain`; siblings are drawn independently."""
    depth = torch.tensor([0, 1, 1, 2, 2, 2])  # of the root and of each node, for its target
    target, draft = _distributions(draw, 3)[depth.to(draw.device)], _distributions(draw, len(_PARENTS))
    ids = draw.integers(_VOCAB, len(_PARENTS)).expand(ROWS, -1).contiguous() if picked else _drawn(draw, draft)
    rows = None if picked else draft.expand(ROWS, -1, -1).contiguous()
    parents = torch.tensor(_PARENTS, device=draw.device)
    return ids, rows, target.expand(ROWS, -1, -1).contiguous(), parents, False, _generator(draw)


def _greedily(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return *args[:-2], True, None


def _verification_groups(op: str, make: Any) -> None:
    @group("result", op, "greedy", every_dtype=True)
    def _greedy(spec: KernelSpec) -> Pairs:
        yield "greedy", lambda draw: _greedily(make(draw))

    @group("result", op, "greedy", "no_draft_probs")
    def _greedy_picked(spec: KernelSpec) -> Pairs:
        yield "greedy_picked", lambda draw: _greedily(make(draw, picked=True))

    @group("speculation", op, "generator", every_dtype=True)
    def _seeded(spec: KernelSpec) -> Pairs:
        yield "drawn", make

    @group("speculation", op, "generator", "no_draft_probs")
    def _picked(spec: KernelSpec) -> Pairs:
        yield "picked", lambda draw: make(draw, picked=True)


_verification_groups("sample_speculative", _chain)
_verification_groups("sample_tree", _tree)
