"""Cases of norms, gated activations, rotary embeddings, the look-up and the loss: their examples at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from layerzero.model.enums import Layout
from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Maker, edges, example, fit, group

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


# -- norms -----------------------------------------------------------------------------------------
def _norm_groups(op: str) -> None:
    def norm(spec: KernelSpec, rows: int, hidden: int, *needs: str, rank: int = 2, **choices: Any) -> Maker:
        if op == "layer_norm" and "bias" in spec.features and "no_weight" not in needs:
            needs = (*needs, "bias")
        return example(op, spec, {"rows": rows, "hidden": hidden}, needs, choices, rank=rank)

    @group("result", op, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield "rows", norm(spec, 5, 96)
        yield "tokens", norm(spec, 6, 160, rank=3)

    @group("eps", op)
    def _eps(spec: KernelSpec) -> Pairs:
        # Numbers so small that where eps stands decides the result.
        yield "small_rows", norm(spec, 4, 64, eps=1e-3, scale=1e-2)

    @group("sizes", op)
    def _sizes(spec: KernelSpec) -> Pairs:
        for hidden in edges(spec, "hidden"):
            yield f"hidden_{hidden}", norm(spec, 3, hidden)

    @group("mixed_weight", op, "mixed_weight", every_dtype=True)
    def _other_dtype(spec: KernelSpec) -> Pairs:
        yield "other_dtype", norm(spec, 4, 64, "mixed_weight")

    if op in ("rms_norm", "layer_norm"):

        @group("no_weight", op, "no_weight")
        def _bare(spec: KernelSpec) -> Pairs:
            yield "plain", norm(spec, 4, 64, "no_weight")

    if op in ("rms_norm", "add_rms_norm"):

        @group("accumulation", op, every_dtype=True)
        def _long_row(spec: KernelSpec) -> Pairs:
            yield "long_row", norm(spec, 3, 2048, positive=True)


for _op in ("rms_norm", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm"):
    _norm_groups(_op)


# -- gated activations and the look-up ---------------------------------------------------------------
def _gated_group(op: str, label: str, *needs: str) -> None:
    @group("result", op, *needs, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield label, example(op, spec, {"rows": 15, "hidden": 48}, needs, rank=3)


_gated_group("silu_and_mul", "plain")
_gated_group("relu_and_mul", "plain")
_gated_group("gelu_and_mul", "erf", "gelu_none")
_gated_group("gelu_and_mul", "tanh", "gelu_tanh")


@group("result", "embedding", every_dtype=True)
def _embedding(spec: KernelSpec) -> Pairs:
    yield "plain", example("embedding", spec, {"tokens": 24, "vocab": 37, "hidden": 32}, rank=2)


# -- RoPE and XPos -----------------------------------------------------------------------------------
def _rotary(op: str, spec: KernelSpec, layout: str, *needs: str, tokens: int = 7) -> Maker:
    dim = fit(spec, "head_dim", 64)
    sizes = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len_q": tokens, "head_dim": dim}
    rotary = dim // 2 if "partial_rotary" in needs else dim
    tables = {} if spec.mixed_dtypes is False else {"tables": torch.float32}
    return example(op, spec, {**sizes, "rotary_dim": rotary}, needs, tables, layout=Layout(layout))


def _layouts(spec: KernelSpec) -> list[str]:
    return sorted(item.value for item in spec.layouts) or ["BHSD"]


def _rotary_groups(op: str, convention: str, options: tuple[str, ...]) -> None:
    @group("result", op, convention, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        if convention == "interleaved":
            yield convention, _rotary(op, spec, _layouts(spec)[0], convention)
        else:
            yield from ((f"{convention}_{word}", _rotary(op, spec, word, convention)) for word in _layouts(spec))

    for feature in options:

        @group("rope_options", op, feature, convention)
        def _option(spec: KernelSpec, feature: str = feature) -> Pairs:
            for word in _layouts(spec):
                yield f"{convention}_{feature}_{word}", _rotary(op, spec, word, convention, feature)
            if convention == "rotate_half":
                yield f"{feature}_one_token", _rotary(op, spec, _layouts(spec)[0], convention, feature, tokens=1)


_ROTARY = ("no_key", "batched_tables", "position_ids", "partial_rotary")
for _op, _convention in product(("rope", "xpos"), ("rotate_half", "interleaved")):
    _rotary_groups(_op, _convention, (*_ROTARY, "inplace") if _op == "rope" else _ROTARY)


# -- cross-entropy -----------------------------------------------------------------------------------
def _loss(spec: KernelSpec, *needs: str, index: str = "int64", **choices: Any) -> Maker:
    given = {"scale": 3.0, "ignored": "some", **choices}
    return example("cross_entropy", spec, {"rows": 15, "vocab": 37}, needs, given, rank=3, index_dtype=index)


@group("result", "cross_entropy", every_dtype=True)
def _loss_plain(spec: KernelSpec) -> Pairs:
    yield "mean", _loss(spec)
    yield "sum", _loss(spec, reduction="sum", ignored="none")
    yield "none", _loss(spec, reduction="none", index="int32")
    yield "all_ignored", _loss(spec, ignored="all")


def _loss_option(label: str, *features: str, **choices: Any) -> None:
    @group("loss_options", "cross_entropy", *features, every_dtype=True)
    def _option(spec: KernelSpec) -> Pairs:
        for reduction in ("mean", "none"):
            yield f"{label}_{reduction}", _loss(spec, *features, reduction=reduction, **choices)


_loss_option("smoothing", "label_smoothing", label_smoothing=0.1)
_loss_option("softcap", "softcap", softcap=5.0)
_loss_option("z_loss", "z_loss", z_loss=1e-2)
_loss_option("lse", "lse")
_loss_option("all", "label_smoothing", "softcap", "z_loss", "lse", label_smoothing=0.2, softcap=4.0, z_loss=1e-3)
