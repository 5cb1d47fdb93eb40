"""Calls of sampling, losses and experts from their contexts: rows of logits, probabilities and routed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero._ops.examples_rows import activation, quantized
from layerzero.tuning.inputs import Draw

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

    def number(self, name: str, usual: float) -> float | Tensor:
        value = self._draw.choice(name, usual)
        if self._draw.choice("by_row") or isinstance(value, list):
            return self._rows(value, torch.float32)
        if self._floats == 0:
            return float(value)
        self._floats -= 1
        dtype = self._draw.dtype()
        if self._mixed:
            dtype = torch.float32 if dtype is not torch.float32 else torch.float64
        return self._rows(value, dtype)

    def whole(self, name: str, usual: int) -> int | Tensor:
        value = self._draw.choice(name, usual)
        if self._whole or self._draw.choice("by_row") or isinstance(value, list):
            return self._rows(value, torch.int64).clamp(max=self._draw.size("vocab"))
        return min(int(value), self._draw.size("vocab"))

    def _rows(self, value: Any, dtype: torch.dtype) -> Tensor:
        """One value for each row, or the same for all."""
        return torch.tensor(value, dtype=dtype, device=self._draw.device).expand(self._draw.size("batch")).contiguous()


def _logits(draw: Draw) -> Tensor:
    """Gaussian, or rows of distinct numbers that every dtype holds, all with the same distribution."""
    batch, vocab = draw.size("batch"), draw.size("vocab")
    if draw.choice("logits") != "distinct":
        return draw.main(batch, vocab)
    steps = draw.uniform(vocab).argsort() - vocab // 2
    return (steps / 8 + torch.arange(batch, device=draw.device)[:, None] % 6 / 4).to(draw.dtype())


def sampling(draw: Draw) -> Args:
    """Logits and filters."""
    op, needs = draw.ctx.op, draw.ctx.needs
    logits, given = _logits(draw), _Parameters(draw)
    if op == "sample_topk":
        return (logits, given.whole("top_k", TOP_K), given.number("temperature", 1.0), draw.generator())
    if op == "sample_topp":
        return (logits, given.number("top_p", TOP_P), given.number("temperature", 1.0), draw.generator())
    top_k = given.whole("top_k", TOP_K) if "sample_top_k" in needs else None
    top_p = given.number("top_p", TOP_P) if "sample_top_p" in needs else None
    min_p = given.number("min_p", MIN_P) if "sample_min_p" in needs else None
    filters = (logits, top_k, top_p, min_p, given.number("temperature", 1.0))
    return filters if op == "sampling_probs" else (*filters, draw.generator())


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
    if draw.choice("ties"):
        logits = (logits * 1.5).round()
    best = min(groups, max(1, -(-k * groups // experts), groups // 2))
    scoring = "sigmoid" if "scoring_sigmoid" in needs else "softmax"
    bias = draw.normal(experts, dtype=torch.float32) if "choice_bias" in needs else None
    return (
        logits,
        (k, groups, draw.choice("groups_kept", best)),
        scoring,
        True,
        bias,
        draw.choice("routed_scale", 1.0),
    )


def grouped_gemm(draw: Draw) -> Args:
    """Rows in groups, one weight each."""
    tokens, experts, n, k = (draw.size(name) for name in ("tokens", "experts", "n", "k"))
    even = [tokens // experts + (place < tokens % experts) for place in range(experts)]
    each = draw.choice("group_sizes", even)
    x = draw.main(tokens, k)
    weights = draw.main(len(each), n, k, place=1, odd=False)
    sizes = torch.tensor(each, dtype=draw.index(), device="cpu").to(draw.device)
    return (x, weights, sizes)


def moe(draw: Draw) -> Args:
    """Routed tokens and their experts."""
    needs = draw.ctx.needs
    tokens, experts, k, hidden, inner = (draw.size(name) for name in ("tokens", "experts", "top_k", "hidden", "inner"))
    rows = inner if "ungated" in needs else 2 * inner
    x = draw.main(tokens, hidden)
    shapes = (experts, rows, hidden), (experts, hidden, inner)
    first, second = (
        draw.leaf(draw.normal(*shape, dtype=draw.dtype(place), scale=shape[-1] ** -0.5))
        if draw.ctx.quant_format is None
        else quantized(draw, shape)
        for place, shape in enumerate(shapes, start=1)
    )
    kind = draw.choice("ids", "drawn")
    among = 4 * experts if kind == "foreign" else experts  # those of other ranks included
    ids = draw.uniform(tokens, among).topk(min(k, among), dim=-1).indices
    if kind == "one":
        ids = torch.full_like(ids, 2)
    elif kind == "foreign":  # and some that are no expert's
        ids[0], ids[1, 0] = -1, 10**6
    elif k > experts:  # more than there are: the last one counts again
        ids = torch.cat((ids, ids[:, -1:].expand(-1, k - experts)), -1)
    shares = draw.uniform(tokens, k).add_(0.1)
    shares = shares / shares.sum(-1, keepdim=True)
    ids = ids.to(draw.index()).contiguous()
    biases: tuple[Tensor | None, ...] = (None, None)
    if "expert_bias" in needs:
        biases = tuple(
            draw.leaf(draw.normal(experts, width, dtype=draw.dtype(1 if draw.ctx.quant_format else 3)))
            for width in (rows, hidden)
        )
    word = "swigluoai" if "activation_swigluoai" in needs else activation(draw, "silu")
    limit = 0.5 if "clamped" in needs else None  # low enough that many numbers meet it
    offset = draw.choice("expert_offset", 0)
    return (x, first, second, shares, ids, word, offset, *biases, 1.702, limit, "interleaved" in needs)
