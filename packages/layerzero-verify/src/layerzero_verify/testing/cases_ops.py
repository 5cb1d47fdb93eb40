"""Cases of linear layers, sampling and quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero.model.kernel import KernelSpec
from layerzero.model.quant import QuantScheme
from layerzero_verify.testing.cases import Draw, Maker, fit, group
from layerzero_verify.testing.weights import weight_for

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


# -- linear ---------------------------------------------------------------------------------------
def _linear(spec: KernelSpec, bias: bool, activation: str | None) -> Maker:
    rows, width, outputs = fit(spec, "rows", 5), fit(spec, "k", 64), fit(spec, "n", 48)

    def make(draw: Draw) -> tuple[Any, ...]:
        x, weight = draw.normal(rows, width), draw.normal(outputs, width, scale=0.1)
        return x, weight_for(spec, weight), draw.normal(outputs) if bias else None, activation

    return make


@group("result", "linear", every_dtype=True)
def _linear_plain(spec: KernelSpec) -> Pairs:
    yield "plain", _linear(spec, False, None)
    if "bias" in spec.features:
        yield "bias", _linear(spec, True, None)


def _activation_group(word: str) -> None:
    @group("activation", "linear", f"activation_{word}")
    def _activated(spec: KernelSpec) -> Pairs:
        yield word, _linear(spec, "bias" in spec.features, word)


for _word in ("gelu", "gelu_tanh", "silu", "relu"):
    _activation_group(_word)


# -- sampling --------------------------------------------------------------------------------------
def _generator(draw: Draw, seed: int = 7) -> torch.Generator:
    return torch.Generator(draw.device).manual_seed(seed)


def _logits(draw: Draw) -> Tensor:
    # Distinct logits: ties would let two right kernels differ.
    return (draw.permutation(97, torch.float32).repeat(6, 1) / 9 + torch.arange(6, device=draw.device)[:, None]).to(
        draw.dtype
    )


_GREEDY: dict[str, Maker] = {
    "sample_topk": lambda draw: (_logits(draw), 5, 0.0, None),
    "sample_topp": lambda draw: (_logits(draw), 0.7, 0.0, None),
    "sample": lambda draw: (_logits(draw), 5, 0.9, None, 0.0, None),
}
# Steep enough (each token 1.7 times as likely as the next) that draws which follow another temperature stand out.
_STEEPNESS = 0.2
_DRAWN: dict[str, Maker] = {
    "sample_topk": lambda draw: (_logits(draw).repeat(400, 1), 3, _STEEPNESS, _generator(draw)),
    "sample_topp": lambda draw: (_logits(draw).repeat(400, 1), 0.8, _STEEPNESS, _generator(draw)),
    "sample": lambda draw: (_logits(draw).repeat(400, 1), 4, 0.9, None, _STEEPNESS, _generator(draw)),
}


def _by_row(make: Maker) -> Maker:
    """The same call with each number as a tensor of one value a row."""

    def wide(draw: Draw) -> tuple[Any, ...]:
        args = make(draw)
        rows = args[0].shape[0]

        def row(value: Any) -> Any:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return value
            kind = torch.int64 if isinstance(value, int) else torch.float32
            return torch.full((rows,), value, dtype=kind, device=draw.device)

        return (args[0], *(row(item) for item in args[1:]))

    return wide


def _sampling_groups(op: str, *filters: str) -> None:
    @group("result", op, *filters, every_dtype=True)
    def _greedy(spec: KernelSpec) -> Pairs:
        yield "greedy", _GREEDY[op]

    @group("result", op, "tensor_params", "mixed_weight", *filters, every_dtype=True)
    def _greedy_by_row(spec: KernelSpec) -> Pairs:
        yield "greedy_by_row", _by_row(_GREEDY[op])

    @group("sampling", op, "generator", "tensor_params", *filters)
    def _drawn_by_row(spec: KernelSpec) -> Pairs:
        yield "seeded_by_row", _by_row(_DRAWN[op])

    @group("sampling", op, "generator", *filters)
    def _drawn(spec: KernelSpec) -> Pairs:
        yield "seeded", _DRAWN[op]


_sampling_groups("sample_topk")
_sampling_groups("sample_topp")
_sampling_groups("sample", "sample_top_k", "sample_top_p")


@group("sampling", "sample", "generator", "sample_min_p", "sample_top_k", "sample_top_p")
def _above_min_p(spec: KernelSpec) -> Pairs:
    yield "min_p", lambda draw: (_logits(draw).repeat(400, 1), 6, 0.95, 0.3, _STEEPNESS, _generator(draw))


# -- quantization ----------------------------------------------------------------------------------
@group("quantized", "quantize", every_dtype=True)
def _quantize(spec: KernelSpec) -> Pairs:
    for fmt in sorted(spec.quant_formats):
        for granularity in sorted(spec.granularities) or ["tensor"]:
            if fmt in ("mxfp4", "nvfp4") and granularity == "channel":
                continue
            scheme = QuantScheme(QuantFormat(fmt), granularity)
            yield f"{fmt}_{granularity}", lambda draw, made=scheme: (draw.normal(6, 256), made)  # type: ignore[misc]
