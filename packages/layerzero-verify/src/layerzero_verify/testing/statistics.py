"""Do draws follow a distribution? Pearson's chi-square test, with the seeds fixed by whoever calls it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["UNLIKELY", "chi_square", "counts_of"]

# A right sampler falls below this once in a million runs, a wrong one nearly always; a fixed seed never flickers.
UNLIKELY = 1e-6

_LEAST_EXPECTED = 5.0


def counts_of(tokens: Tensor, cells: int) -> Tensor:
    """How often each of the numbers 0 … cells - 1 occurs."""
    return torch.bincount(tokens.flatten().cpu(), minlength=cells)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The chance that draws from `probs` differ from it by as much as these counts do, or more.

    0 when something was drawn that has no probability. Cells that expect fewer than five draws are taken together.
    """
    seen, share = counts.double().flatten().cpu(), probs.double().flatten().cpu()
    if seen.shape != share.shape:
        raise ValueError(f"{seen.numel()} counts for {share.numel()} probabilities")
    if bool((seen[share == 0] > 0).any()):
        return 0.0
    expected = share / share.sum() * seen.sum()
    rare = expected < _LEAST_EXPECTED
    seen = torch.cat((seen[~rare], seen[rare].sum().reshape(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().reshape(1)))
    full = expected >= _LEAST_EXPECTED
    freedom = int(full.sum()) - 1
    if freedom < 1:
        return 1.0
    statistic = ((seen - expected)[full].square() / expected[full]).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))
