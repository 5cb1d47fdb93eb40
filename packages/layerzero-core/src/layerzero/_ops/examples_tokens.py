"""Calls of sampling, losses and experts from their contexts: rows of logits, probabilities and routed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.tuning.inputs import Draw, lay

__all__ = ["cross_entropy", "gate", "grouped_gemm", "moe", "sampling", "speculative"]

Args = tuple[Any, ...]

TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05


class _Parameters:
    """Numbers, or tensors of one number a row where the context has such; how many are floating it says by dtypes."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        needs = draw.ctx.needs
        self._mixed = "mixed_weight" in needs
        self._floats = len(draw.ctx.dtypes) - 1 + self._mixed if "tensor_params" in needs else 0
        self._whole = "tensor_params" in needs and self._floats == 0

    def number(self, value: float) -> float | Tensor:
        """A floating parameter."""
        if self._floats == 0:
            return value
        self._floats -= 1
        dtype = self._draw.dtype()
        if self._mixed:
            dtype = torch.float32 if dtype is not torch.float32 else torch.float64
        return torch.full((self._draw.size("batch"),), value, dtype=dtype, device=self._draw.device)

    def whole(self, value: int) -> int | Tensor:
        """A whole parameter."""
        value = min(value, self._draw.size("vocab"))
        if not self._whole:
            return value
        return torch.full((self._draw.size("batch"),), value, dtype=torch.int64, device=self._draw.device)


def sampling(draw: Draw) -> Args:
    """Logits and filters."""
    op, needs = draw.ctx.op, draw.ctx.needs
    logits = draw.main(draw.size("batch"), draw.size("vocab"))
    given = _Parameters(draw)
    if op == "sample_topk":
        k = given.whole(draw.choice("top_k", TOP_K))
        return (logits, k, given.number(1.0), draw.generator())
    if op == "sample_topp":
        p = given.number(draw.choice("top_p", TOP_P))
        return (logits, p, given.number(1.0), draw.generator())
    top_k = given.whole(draw.choice("top_k", TOP_K)) if "sample_top_k" in needs else None
    top_p = given.number(draw.choice("top_p", TOP_P)) if "sample_top_p" in needs else None
    min_p = given.number(MIN_P) if "sample_min_p" in needs else None
    filters = (logits, top_k, top_p, min_p, given.number(1.0))
    return filters if op == "sampling_probs" else (*filters, draw.generator())


def speculative(draw: Draw) -> Args:
    """Drafted tokens and the probabilities they are judged by."""
    ctx, needs = draw.ctx, draw.ctx.needs
    batch, length, vocab = draw.size("batch"), draw.size("draft_len"), draw.size("vocab")
    ids = draw.integers(vocab, batch, length)
    target = draw.normal(batch, length + 1, vocab, dtype=torch.float32).softmax(-1).to(draw.dtype())
    drafted = None
    if "no_draft_probs" not in needs:
        dtype = draw.dtype()
        if "mixed_weight" in needs:
            dtype = torch.float32 if dtype is not torch.float32 else torch.float16
        drafted = draw.normal(batch, length, vocab, dtype=torch.float32).softmax(-1).to(dtype)
    target = lay(target, ctx.strides)
    tail = ("greedy" in needs, draw.generator())
    if ctx.op == "sample_tree":
        parents = torch.arange(-1, length - 1, dtype=torch.int64, device=draw.device)
        return (ids, drafted, target, parents, *tail)
    return (ids, drafted, target, *tail)


def cross_entropy(draw: Draw) -> Args:
    """Logits and labels."""
    needs, rank = draw.ctx.needs, draw.ctx.rank
    rows, vocab = draw.size("rows"), draw.size("vocab")
    shape = () if rank == 1 else (*(1,) * (rank - 2), rows)
    logits, labels = draw.main(*shape, vocab), draw.integers(vocab, *shape, dtype=draw.index())
    share = {"none": 0.0, "some": 0.4, "all": 1.0}[draw.choice("ignored", "none")]
    if share:
        labels = labels.masked_fill(draw.uniform(*shape) < share, -100)
    usual = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}
    options = (draw.choice(name, value) if name in needs else None for name, value in usual.items())
    return (logits, labels, -100, *options, draw.choice("reduction", "mean"), "lse" in needs)


def gate(draw: Draw) -> Args:
    """Router logits."""
    needs = draw.ctx.needs
    experts, k, groups = draw.size("experts"), draw.size("top_k"), draw.size("groups")
    logits = draw.main(draw.size("tokens"), experts)
    best = min(groups, max(1, -(-k * groups // experts), groups // 2))
    scoring = "sigmoid" if "scoring_sigmoid" in needs else "softmax"
    bias = draw.normal(experts, dtype=torch.float32) if "choice_bias" in needs else None
    return (logits, (k, groups, best), scoring, True, bias, 1.0)


def grouped_gemm(draw: Draw) -> Args:
    """Rows in groups, one weight each."""
    tokens, experts, n, k = (draw.size(name) for name in ("tokens", "experts", "n", "k"))
    x = draw.main(tokens, k)
    weights = draw.main(experts, n, k, place=1, odd=False)
    each = [tokens // experts + (place < tokens % experts) for place in range(experts)]
    sizes = torch.tensor(each, dtype=draw.index(), device="cpu").to(draw.device)
    return (x, weights, sizes)


def moe(draw: Draw) -> Args:
    """Routed tokens and their experts."""
    needs = draw.ctx.needs
    tokens, experts, k, hidden, inner = (draw.size(name) for name in ("tokens", "experts", "top_k", "hidden", "inner"))
    rows = inner if "ungated" in needs else 2 * inner
    x = draw.main(tokens, hidden)
    first = draw.leaf(draw.normal(experts, rows, hidden, dtype=draw.dtype(1), scale=hidden**-0.5))
    second = draw.leaf(draw.normal(experts, hidden, inner, dtype=draw.dtype(2), scale=inner**-0.5))
    chosen = draw.uniform(tokens, experts).topk(min(k, experts), dim=-1)
    ids = chosen.indices
    if k > experts:  # more than there are: the last one counts again
        ids = torch.cat((ids, ids[:, -1:].expand(-1, k - experts)), -1)
    shares = draw.uniform(tokens, k).add_(0.1)
    shares = shares / shares.sum(-1, keepdim=True)
    activation = next((word.removeprefix("activation_") for word in needs if word.startswith("activation_")), "silu")
    return (x, first, second, shares, ids.to(draw.index()).contiguous(), activation, 0)
