"""Cases of the feed-forward block, of routing and of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]

_WORDS = ("gelu", "gelu_tanh", "silu", "relu")


def _first_word(spec: KernelSpec) -> str:
    return next((word for word in ("silu", *_WORDS) if f"activation_{word}" in spec.features), "silu")


# -- the feed-forward block ----------------------------------------------------------------------------
def _mlp(
    spec: KernelSpec,
    kind: str,
    activation: str,
    *,
    bias: bool = False,
    lead: tuple[int, ...] = (5,),
    square: bool = False,
) -> Maker:
    hidden, inner = fit(spec, "hidden", 48), fit(spec, "inner", 64)
    out = hidden if square else fit(spec, "n", 40)
    rows = 2 * inner if kind == "gated" else inner
    split = kind == "split_gate"

    def make(draw: Draw) -> tuple[Any, ...]:
        up, down = draw.normal(rows, hidden, scale=0.1), draw.normal(out, inner, scale=0.1)
        gate = draw.normal(inner, hidden, scale=0.1) if split else None
        biases: tuple[Any, ...] = (None, None, None)
        if bias:
            small = (draw.normal(rows, scale=0.2), draw.normal(inner, scale=0.2), draw.normal(out, scale=0.2))
            biases = (small[0], small[1] if split else None, small[2])
        return draw.normal(*lead, hidden), up, down, gate, activation, *biases

    return make


def _mlp_groups(kind: str) -> None:
    @group("result", "mlp", kind, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield kind, _mlp(spec, kind, _first_word(spec))
        yield f"{kind}_tokens", _mlp(spec, kind, _first_word(spec), lead=(2, 3))
        yield f"{kind}_square", _mlp(spec, kind, _first_word(spec), square=True)  # some blocks give back what they take

    @group("result", "mlp", kind, "bias", every_dtype=True)
    def _biased(spec: KernelSpec) -> Pairs:
        yield f"{kind}_bias", _mlp(spec, kind, _first_word(spec), bias=True)

    for word in _WORDS:
        _activated_mlp(kind, word)


def _activated_mlp(kind: str, word: str) -> None:
    @group("activation", "mlp", kind, f"activation_{word}")
    def _activated(spec: KernelSpec) -> Pairs:
        yield f"{kind}_{word}", _mlp(spec, kind, word)


for _kind in ("gated", "split_gate", "ungated"):
    _mlp_groups(_kind)


# -- routing -------------------------------------------------------------------------------------------
def _gate(
    spec: KernelSpec, scoring: str, *, bias: bool = False, groups: tuple[int, int] = (1, 1), ties: bool = False
) -> Maker:
    experts = fit(spec, "experts", 32)
    top_k = fit(spec, "top_k", 6)

    def make(draw: Draw) -> tuple[Any, ...]:
        logits = draw.normal(20, experts)
        if ties:
            # Few different logits, so that most of the choice is made by id.
            logits = (logits * 1.5).round()
        added = draw.normal(experts, scale=0.3).float() if bias else None
        return logits, (top_k, *groups), scoring, True, added, 1.5

    return make


def _gate_groups(scoring: str) -> None:
    feature = f"scoring_{scoring}"

    @group("result", "topk_gate", feature, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield scoring, _gate(spec, scoring)
        yield f"{scoring}_ties", _gate(spec, scoring, ties=True)

    @group("result", "topk_gate", feature, "choice_bias")
    def _biased(spec: KernelSpec) -> Pairs:
        yield f"{scoring}_bias", _gate(spec, scoring, bias=True)

    @group("result", "topk_gate", feature, "expert_groups")
    def _grouped(spec: KernelSpec) -> Pairs:
        yield f"{scoring}_groups", _gate(spec, scoring, groups=(8, 3))

    @group("result", "topk_gate", feature, "expert_groups", "choice_bias")
    def _both(spec: KernelSpec) -> Pairs:
        yield f"{scoring}_groups_bias", _gate(spec, scoring, bias=True, groups=(8, 3))


for _scoring in ("softmax", "sigmoid"):
    _gate_groups(_scoring)


# -- one weight per group of rows ------------------------------------------------------------------------
def _grouped(spec: KernelSpec, sizes: tuple[int, ...], rows: int, index: torch.dtype = torch.int64) -> Maker:
    n, k = fit(spec, "n", 40), fit(spec, "k", 64)

    def make(draw: Draw) -> tuple[Any, ...]:
        counts = torch.tensor(sizes, dtype=index).to(draw.device)
        return draw.normal(rows, k), draw.normal(len(sizes), n, k, scale=0.1), counts

    return make


@group("result", "grouped_gemm", every_dtype=True)
def _groups(spec: KernelSpec) -> Pairs:
    yield "full", _grouped(spec, (3, 5, 4), 12)
    yield "empty_groups", _grouped(spec, (0, 5, 0, 2, 0), 7, torch.int32)
    yield "rows_left_over", _grouped(spec, (2, 0, 3), 9)
    yield "one_group_has_all", _grouped(spec, (0, 6), 6)


@group("sizes", "grouped_gemm")
def _group_sizes(spec: KernelSpec) -> Pairs:
    for width in {*edges(spec, "n"), *edges(spec, "k")}:
        yield f"width_{width}", lambda draw, w=width: (  # type: ignore[misc]
            draw.normal(5, w), draw.normal(2, w, w, scale=0.1), torch.tensor([2, 3]).to(draw.device),
        )  # fmt: skip


# -- the experts -----------------------------------------------------------------------------------------
def _moe(
    spec: KernelSpec,
    kind: str,
    activation: str,
    *,
    ids: str = "drawn",
    offset: int = 0,
    index: torch.dtype = torch.int64,
) -> Maker:
    hidden, inner = fit(spec, "hidden", 40), fit(spec, "inner", 24)
    # Small products: a CPU without bfloat16 instructions makes torch warn at larger ones.
    experts, top_k = 6, 3
    tokens = 2 if ids == "one" else 7
    rows = 2 * inner if kind == "gated" else inner

    def chosen(draw: Draw) -> Tensor:
        if ids == "one":
            return torch.full((tokens, top_k), 2, dtype=index).to(draw.device)
        scores = draw.normal(tokens, 4 * experts if ids == "foreign" else experts).float()
        found = scores.topk(top_k, dim=-1).indices
        if ids == "foreign":
            found[0], found[1, 0] = -1, 10**6
        return found.to(index)

    def make(draw: Draw) -> tuple[Any, ...]:
        gate_up, down = draw.normal(experts, rows, hidden, scale=0.15), draw.normal(experts, hidden, inner, scale=0.15)
        shares = draw.normal(tokens, top_k).float().softmax(dim=-1)
        return draw.normal(tokens, hidden), gate_up, down, shares, chosen(draw), activation, offset

    return make


def _moe_groups(kind: str) -> None:
    @group("result", "moe", kind, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield kind, _moe(spec, kind, _first_word(spec))
        yield f"{kind}_one_expert", _moe(spec, kind, _first_word(spec), ids="one", index=torch.int32)
        yield f"{kind}_other_ranks", _moe(spec, kind, _first_word(spec), ids="foreign", offset=6)

    for word in _WORDS:
        _activated_moe(kind, word)


def _activated_moe(kind: str, word: str) -> None:
    @group("activation", "moe", kind, f"activation_{word}")
    def _activated(spec: KernelSpec) -> Pairs:
        yield f"{kind}_{word}", _moe(spec, kind, word)


for _kind in ("gated", "ungated"):
    _moe_groups(_kind)
