"""Judging samplers: tokens of different generators cannot be compared, their distribution can.

Rows are repeated and drawn from many times. Every token has to be one that the filters allow, and the counts have to
fit the exact probabilities (Pearson's chi-square, turned into a normal deviate by Wilson and Hilferty's cube root).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]

# One-sided chance of a right sampler beyond this: 3 in 10 million. Seeds are fixed, so a verdict never flickers.
MAX_DEVIATE = 5.0
_EDGE = 1e-5  # a token whose cumulative probability lies this close to top_p may be kept or dropped
_CELLS = 2**22
_LEAST_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the draws showed: `ok` of their distribution, `deterministic` where the same seed drew the same again.

    `tvd` is the total variation distance of the worst row, `deviate` the worst value of the test.
    """

    ok: bool
    deterministic: bool
    draws: int
    outside: int
    tvd: float
    max_abs: float
    max_rel: float
    deviate: float

    def __str__(self) -> str:
        word = "ok" if self.ok else "FAIL"
        return (
            f"{word}: {self.draws} draws a row, {self.outside} outside the allowed tokens, total variation distance "
            f"{self.tvd:.4f}, chi-square deviate {self.deviate:.2f} (limit {MAX_DEVIATE})"
            + ("" if self.deterministic else "; the same seed drew other tokens")
        )


def allowed_and_expected(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Which tokens may come, and how likely each is: top-k first, then top-p of what is left, then min-p."""
    probs = inputs["probs"].double().cpu()
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    edge = keep.clone()
    if "top_k" in inputs:
        k = _column(inputs["top_k"])
        keep = edge = (torch.arange(ordered.shape[-1])[None] < k) | (k <= 0)
        ordered = ordered * keep / (ordered * keep).sum(dim=-1, keepdim=True)
    if "top_p" in inputs:
        p = _column(inputs["top_p"])
        before = ordered.cumsum(dim=-1) - ordered
        keep, edge = keep & ((before < p) | (p >= 1)), edge & ((before < p + _EDGE) | (p >= 1))
    if "min_p" in inputs:
        floor = _column(inputs["min_p"]) * ordered[:, :1]
        keep, edge = keep & (ordered >= floor), edge & (ordered >= floor * (1 - _EDGE))
    keep[:, 0] = edge[:, 0] = True
    ordered = ordered * keep / (ordered * keep).sum(dim=-1, keepdim=True)
    back = ids.argsort(dim=-1)
    return edge.gather(1, back), ordered.gather(1, back)


def judge(draw: Callable[[dict[str, Any], torch.Generator], Tensor], inputs: Inputs, seed: int = 0) -> Verdict:
    """Draw often and look. `draw(inputs, generator)` gives one token for each row of the inputs."""
    allowed, expected = allowed_and_expected(inputs)
    rows, vocab = expected.shape
    wanted = max(256, min(512, 2**24 // max(vocab, 1)))
    times = max(1, min(wanted, _CELLS // max(rows * vocab, 1)))
    rounds = -(-wanted // times)
    device = inputs["probs"].device
    generator = torch.Generator(device=device).manual_seed(seed)
    many = {  # row r of repetition n is at n * batch + r
        name: item.repeat(times, *(1,) * (item.ndim - 1)) if isinstance(item, Tensor) and item.ndim else item
        for name, item in inputs.items()
    }
    counts = torch.zeros(rows, vocab, dtype=torch.float64)
    first = torch.empty(0)
    for number in range(rounds):
        tokens = draw(many, generator).cpu().long().reshape(times, rows)
        first = tokens if number == 0 else first
        if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
            raise ValueError(f"a token outside the vocabulary of {vocab}: {int(tokens.min())} to {int(tokens.max())}")
        counts += torch.stack([torch.bincount(column, minlength=vocab) for column in tokens.T])
    again = draw(many, torch.Generator(device=device).manual_seed(seed)).cpu().long().reshape(times, rows)
    total = times * rounds
    outside = int((counts * ~allowed).sum())
    gap = (counts / total - expected).abs()
    deviate = max((_deviate(row, share * total) for row, share in zip(counts, expected, strict=True)), default=0.0)
    return Verdict(
        outside == 0 and deviate <= MAX_DEVIATE,
        torch.equal(first, again),
        total,
        outside,
        tvd=0.5 * float(gap.sum(dim=-1).max()),
        max_abs=float(gap.max()),
        max_rel=float((gap / (expected + 1e-8))[expected > 0].max()),
        deviate=deviate,
    )


def _deviate(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the counts are from what is expected.

    Tokens are taken in the order of their probability, rare ones together until they are common enough to count.
    """
    order = expected.argsort(descending=True)
    share = expected[order]
    # The cell of a token by the expectation before its middle: a common token has one of its own.
    cell = ((share.cumsum(0) - share / 2) / (2 * _LEAST_EXPECTED)).floor().long()
    wanted = torch.bincount(cell, weights=share)
    seen = torch.bincount(cell, weights=counts[order], minlength=len(wanted))
    full = wanted >= _LEAST_EXPECTED
    freedom = int(full.sum()) - 1
    if freedom < 1:
        return 0.0
    chi_square = float(((seen - wanted)[full].square() / wanted[full]).sum())
    spread = 2.0 / (9.0 * freedom)
    return float(((chi_square / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread))


def _column(value: Any) -> Tensor:
    return torch.as_tensor(value).double().cpu().reshape(-1, 1)
