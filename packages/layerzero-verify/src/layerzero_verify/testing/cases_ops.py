"""Cases of the other ops: norms, rotary embedding, gated activations, linear, embedding, sampling, quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero.model.kernel import KernelSpec
from layerzero.model.quant import QuantScheme
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group
from layerzero_verify.testing.weights import weight_for

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


# -- norms -----------------------------------------------------------------------------------------
def _norm(
    spec: KernelSpec, rows: tuple[int, ...], hidden: int, *, eps: float = 1e-6, scale: float = 1.0, weight: bool = True
) -> Maker:
    op = spec.op

    def make(draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(*rows, hidden, scale=scale)
        gain = draw.normal(hidden) if weight else None
        if op == "add_rms_norm":
            return x, draw.normal(*rows, hidden, scale=scale), gain, eps
        if op == "layer_norm":
            return x, gain, draw.normal(hidden) if weight and "bias" in spec.features else None, eps
        return x, gain, eps

    return make


def _reweighed(args: tuple[Any, ...], first: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The call with its weight and bias in another dtype than the activations."""
    other = torch.float32 if dtype is not torch.float32 else torch.bfloat16
    return tuple(
        item.to(other) if place >= first and isinstance(item, Tensor) else item for place, item in enumerate(args)
    )


def _norm_groups(op: str) -> None:
    @group("result", op, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield "rows", _norm(spec, (5,), fit(spec, "hidden", 96))
        yield "tokens", _norm(spec, (2, 3), fit(spec, "hidden", 160))

    @group("eps", op)
    def _eps(spec: KernelSpec) -> Pairs:
        # Numbers so small that where eps stands decides the result.
        yield "small_rows", _norm(spec, (4,), fit(spec, "hidden", 64), eps=1e-3, scale=1e-2)

    @group("sizes", op)
    def _sizes(spec: KernelSpec) -> Pairs:
        for hidden in edges(spec, "hidden"):
            yield f"hidden_{hidden}", _norm(spec, (3,), hidden)

    @group("mixed_weight", op, "mixed_weight", every_dtype=True)
    def _other_dtype(spec: KernelSpec) -> Pairs:
        make = _norm(spec, (4,), fit(spec, "hidden", 64))
        yield "other_dtype", lambda draw: _reweighed(make(draw), 1 if op != "add_rms_norm" else 2, draw.dtype)

    @group("no_weight", op, "no_weight")
    def _bare(spec: KernelSpec) -> Pairs:
        if op != "add_rms_norm":
            yield "plain", _norm(spec, (4,), fit(spec, "hidden", 64), weight=False)


for _op in ("rms_norm", "add_rms_norm", "layer_norm"):
    _norm_groups(_op)


# -- rotary embedding ------------------------------------------------------------------------------
def _tables(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length).unsqueeze(-1) * (10000.0 ** (-torch.arange(width) / width))
    return angles.cos().to(device), angles.sin().to(device)


def _rope(
    spec: KernelSpec,
    *,
    interleaved: bool = False,
    layout: str | None = None,
    rotary: int | None = None,
    ids: bool = False,
    inplace: bool = False,
    keys: bool = True,
    batched: bool = False,
) -> Maker:
    dim = fit(spec, "head_dim", 64)
    layouts = sorted(item.value for item in spec.layouts) or ["BHSD"]
    chosen = layout or layouts[0]

    def make(draw: Draw) -> tuple[Any, ...]:
        def tensor(heads: int) -> Tensor:
            return draw.normal(2, heads, 7, dim) if chosen == "BHSD" else draw.normal(2, 7, heads, dim)

        cos, sin = _tables(16 if ids else 7, (rotary or dim) // 2, draw.device)
        if spec.mixed_dtypes is False:
            cos, sin = cos.to(draw.dtype), sin.to(draw.dtype)
        if batched:  # one table per sequence, full width, as transformers makes them
            cos, sin = (torch.cat((table, table), dim=-1).expand(2, -1, -1).contiguous() for table in (cos, sin))
        positions = draw.integers(16, 2, 7) if ids else None
        return tensor(4), tensor(2) if keys else None, cos, sin, interleaved, chosen, positions, inplace

    return make


@group("result", "rope", "rotate_half", every_dtype=True)
def _rotate_half(spec: KernelSpec) -> Pairs:
    for layout in sorted(item.value for item in spec.layouts) or ["BHSD"]:
        yield f"rotate_half_{layout}", _rope(spec, layout=layout)


@group("rope_options", "rope", "no_key", "rotate_half")
def _query_only(spec: KernelSpec) -> Pairs:
    yield "query_only", _rope(spec, keys=False)


@group("rope_options", "rope", "batched_tables", "rotate_half")
def _batched(spec: KernelSpec) -> Pairs:
    yield "batched_tables", _rope(spec, batched=True)


@group("result", "rope", "interleaved", every_dtype=True)
def _interleaved(spec: KernelSpec) -> Pairs:
    yield "interleaved", _rope(spec, interleaved=True)


@group("rope_options", "rope", "partial_rotary", "rotate_half")
def _partial(spec: KernelSpec) -> Pairs:
    yield "partial", _rope(spec, rotary=fit(spec, "head_dim", 64) // 2)


@group("rope_options", "rope", "position_ids", "rotate_half")
def _positions(spec: KernelSpec) -> Pairs:
    yield "position_ids", _rope(spec, ids=True)


# -- gated activations, linear, embedding ----------------------------------------------------------
def _gated_group(op: str, label: str, *rest: str, requires: tuple[str, ...] = ()) -> None:
    @group("result", op, *requires, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        width = 2 * fit(spec, "hidden", 48)
        yield label, lambda draw: (draw.normal(3, 5, width), *rest)


_gated_group("silu_and_mul", "plain")
_gated_group("relu_and_mul", "plain")
_gated_group("gelu_and_mul", "erf", "none", requires=("gelu_none",))
_gated_group("gelu_and_mul", "tanh", "tanh", requires=("gelu_tanh",))


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


@group("result", "embedding", every_dtype=True)
def _embedding(spec: KernelSpec) -> Pairs:
    yield "plain", lambda draw: (draw.integers(37, 4, 6), draw.normal(37, 32), None)


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
