"""The truth of a layer: each op by its formula in plain torch, in whatever dtype is given; float64 is exact enough.

An op of a plugin that stands in for a built-in one is held, here as in the kernel tests, against its own reference:
whether that reference is what a real model needs is the question of level 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero_verify.block import Tables, forward
from layerzero_verify.oracles import ORACLES
from layerzero_verify.weights import LayerWeights

__all__ = ["Truth", "rope_tables"]


def rope_tables(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] in float64."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64).outer(rates)
    return angles.cos(), angles.sin()


class Truth:
    """Called as a `Caller` is, it runs no kernel. `references` replaces formulas by the reference of a plugin's op."""

    def __init__(self, references: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.formulas = {**ORACLES, **(references or {})}
        self.stages: dict[str, tuple[str, str]] = defaultdict(lambda: ("", ""))

    def __call__(self, stage: str, op: str, *args: Any, **kwargs: Any) -> Any:
        """The op's result on public arguments."""
        canonical, _, _ = public_op(op).normalize(args, kwargs)
        return self.formulas[op](*canonical)

    def layer(self, weights: LayerWeights, x: Tensor, tables: Tables) -> dict[str, Tensor]:
        """Every stage of a causal layer on x [B, S, H], in the dtype of x."""
        return forward(self, weights, x, tables)
