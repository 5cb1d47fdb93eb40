"""Do draws follow a distribution? Pearson's chi-square test, with the seeds fixed by whoever calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.tuning.truth import UNLIKELY, chi_square

__all__ = ["UNLIKELY", "chi_square", "counts_of"]


def counts_of(tokens: Tensor, cells: int) -> Tensor:
    """How often each of the numbers 0 … cells - 1 occurs."""
    return torch.bincount(tokens.flatten().cpu(), minlength=cells)
