"""Cases of RoPE's further options, XPos, Gemma's norms, cross-entropy and cast."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


# -- RoPE's further options, and XPos ---------------------------------------------------------------
def _tables(length: int, width: int, interleaved: bool, batched: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length).unsqueeze(-1) * (10000.0 ** (-torch.arange(width) / width))
    if batched:  # full width, and the two elements of a pair need not have the same entry
        wide = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
        angles = wide * torch.linspace(1.0, 1.1, wide.shape[-1]) * torch.tensor([1.0, 0.9])[:, None, None]
    return angles.cos().to(device), angles.sin().to(device)


def _rotary(
    spec: KernelSpec,
    *,
    interleaved: bool = False,
    layout: str | None = None,
    partial: bool = False,
    ids: bool = False,
    keys: bool = True,
    batched: bool = False,
    inplace: bool = False,
) -> Maker:
    dim = fit(spec, "head_dim", 64)
    layouts = sorted(item.value for item in spec.layouts) or ["BHSD"]
    chosen = layout or layouts[0]

    def make(draw: Draw) -> tuple[Any, ...]:
        def tensor(heads: int) -> Tensor:
            return draw.normal(2, heads, 7, dim) if chosen == "BHSD" else draw.normal(2, 7, heads, dim)

        cos, sin = _tables(32 if ids else 7, dim // (4 if partial else 2), interleaved, batched, draw.device)
        positions = draw.integers(32, 2, 7) if ids else None
        given = tensor(4), tensor(2) if keys else None, cos, sin, interleaved, chosen, positions
        # A base so small that seven positions show the decay, and so large that no pair of large numbers cancels.
        return (*given, 64.0, 0.4, 2.5) if spec.op == "xpos" else (*given, inplace)

    return make


@group("result", "xpos", "rotate_half", every_dtype=True)
def _halves(spec: KernelSpec) -> Pairs:
    for layout in sorted(item.value for item in spec.layouts) or ["BHSD"]:
        yield f"rotate_half_{layout}", _rotary(spec, layout=layout)


@group("result", "xpos", "interleaved", every_dtype=True)
def _interleaved(spec: KernelSpec) -> Pairs:
    yield "interleaved", _rotary(spec, interleaved=True)


def _rotary_option(op: str, convention: str, feature: str, **options: bool) -> None:
    @group("rope_options", op, feature, convention)
    def _option(spec: KernelSpec) -> Pairs:
        for layout in sorted(item.value for item in spec.layouts) or ["BHSD"]:
            made = _rotary(spec, interleaved=convention == "interleaved", layout=layout, **options)
            yield f"{convention}_{feature}_{layout}", made


for _op, _convention in product(("rope", "xpos"), ("rotate_half", "interleaved")):
    _rotary_option(_op, _convention, "no_key", keys=False)
    _rotary_option(_op, _convention, "batched_tables", batched=True)
    _rotary_option(_op, _convention, "position_ids", ids=True)
    _rotary_option(_op, _convention, "partial_rotary", partial=True)
    if _op == "rope":
        _rotary_option(_op, _convention, "inplace", inplace=True)


# -- Gemma's norms ---------------------------------------------------------------------------------
def _gemma(op: str, rows: tuple[int, ...], hidden: int, *, eps: float = 1e-6, scale: float = 1.0) -> Maker:
    def make(draw: Draw) -> tuple[Any, ...]:
        x, weight = draw.normal(*rows, hidden, scale=scale), draw.normal(hidden, scale=0.5)
        if op == "gemma_add_rms_norm":
            return x, draw.normal(*rows, hidden, scale=scale), weight, eps
        return x, weight, eps

    return make


def _mixed(op: str, hidden: int) -> Maker:
    def make(draw: Draw) -> tuple[Any, ...]:
        *given, weight, eps = _gemma(op, (4,), hidden)(draw)
        other = torch.float32 if draw.dtype is not torch.float32 else torch.bfloat16
        return *given, weight.to(other), eps

    return make


def _gemma_groups(op: str) -> None:
    @group("result", op, every_dtype=True)
    def _plain(spec: KernelSpec) -> Pairs:
        yield "rows", _gemma(op, (5,), fit(spec, "hidden", 96))
        yield "tokens", _gemma(op, (2, 3), fit(spec, "hidden", 160))

    @group("eps", op)
    def _eps(spec: KernelSpec) -> Pairs:
        yield "small_rows", _gemma(op, (4,), fit(spec, "hidden", 64), eps=1e-3, scale=1e-2)

    @group("sizes", op)
    def _sizes(spec: KernelSpec) -> Pairs:
        for hidden in edges(spec, "hidden"):
            yield f"hidden_{hidden}", _gemma(op, (3,), hidden)

    @group("mixed_weight", op, "mixed_weight", every_dtype=True)
    def _mixed_weight(spec: KernelSpec) -> Pairs:
        yield "other_dtype", _mixed(op, fit(spec, "hidden", 64))


_gemma_groups("gemma_rms_norm")
_gemma_groups("gemma_add_rms_norm")


# -- cross-entropy ---------------------------------------------------------------------------------
def _loss(
    spec: KernelSpec,
    reduction: str = "mean",
    *,
    smoothing: float | None = None,
    softcap: float | None = None,
    z_loss: float | None = None,
    lse: bool = False,
    ignored: str = "some",
    index: torch.dtype = torch.int64,
) -> Maker:
    vocab = fit(spec, "vocab", 37)

    def make(draw: Draw) -> tuple[Any, ...]:
        logits = draw.normal(3, 5, vocab, scale=3.0)
        labels = draw.integers(vocab, 3, 5, dtype=index)
        if ignored == "all":
            labels = torch.full_like(labels, -100)
        elif ignored == "some":
            labels = labels.masked_fill(~draw.bools(3, 5), -100)
        return logits, labels, -100, smoothing, softcap, z_loss, reduction, lse

    return make


@group("result", "cross_entropy", every_dtype=True)
def _loss_plain(spec: KernelSpec) -> Pairs:
    yield "mean", _loss(spec)
    yield "sum", _loss(spec, "sum", ignored="none")
    yield "none", _loss(spec, "none", index=torch.int32)
    yield "all_ignored", _loss(spec, ignored="all")


def _loss_option(label: str, *features: str, **options: Any) -> None:
    @group("loss_options", "cross_entropy", *features, every_dtype=True)
    def _option(spec: KernelSpec) -> Pairs:
        for reduction in ("mean", "none"):
            yield f"{label}_{reduction}", _loss(spec, reduction, **options)


_loss_option("smoothing", "label_smoothing", smoothing=0.1)
_loss_option("softcap", "softcap", softcap=5.0)
_loss_option("z_loss", "z_loss", z_loss=1e-2)
_loss_option("lse", "lse", lse=True)
_loss_option("all", "label_smoothing", "softcap", "z_loss", "lse", smoothing=0.2, softcap=4.0, z_loss=1e-3, lse=True)


# -- cast ------------------------------------------------------------------------------------------
_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e5m2)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _numbers(draw: Draw, dtype: torch.dtype) -> Tensor:
    """Small and large numbers, ties of the narrower dtypes, what is no number; integers with every bit in use."""
    if not dtype.is_floating_point:
        found = draw.integers(2**31, 256) - 2**30
        return torch.cat((found * 2**32 + found if dtype is torch.int64 else found, found >> 15, found >> 26)).to(dtype)
    steps = 1.0 + torch.arange(64, dtype=torch.float64) / 64.0
    if dtype is torch.float64:
        steps = torch.cat((steps, steps + 2.0**-40))  # so near a tie that float32 would make it one
    powers = 2.0 ** torch.arange(-24, 25, 3, dtype=torch.float64)
    special = torch.tensor([0.0, 447.0, 464.0, 465.0, 61440.0, 3e9, 1e20, 1e38, torch.nan, torch.inf])
    magnitudes = torch.cat(((steps[:, None] * powers).flatten(), special.double()))
    return torch.cat((magnitudes, -magnitudes)).to(dtype).to(draw.device)


def _cast(source: torch.dtype, target: torch.dtype, saturate: bool) -> Maker:
    return lambda draw: (_numbers(draw, source), target, saturate)


def _casts(
    *features: str, sources: tuple[torch.dtype, ...], targets: tuple[torch.dtype, ...], saturate: bool = False
) -> None:
    """A group for pairs that all need these features; what a pair is follows from its tensor, not from `draw.dtype`."""

    @group("cast_options", "cast", *features)
    def _pairs(spec: KernelSpec) -> Pairs:
        for source in sources:
            for target in targets:
                pair = " ".join(str(dtype).removeprefix("torch.") for dtype in (source, target))
                yield f"{pair}{' saturate' if saturate else ''}".replace(" ", "_"), _cast(source, target, saturate)


@group("result", "cast", every_dtype=True)
def _wider(spec: KernelSpec) -> Pairs:
    yield "float32", lambda draw: (draw.normal(6, 5), torch.float32, False)
    yield "float64", lambda draw: (_numbers(draw, draw.dtype), torch.float64, False)


_casts(sources=_NARROW, targets=_FLOATS)
_casts(sources=_INTEGERS, targets=(*_INTEGERS, torch.float32, torch.float64))
_casts(sources=(torch.int8, torch.uint8, torch.int16, torch.bool), targets=_FLOATS)
_casts("from_float8", sources=_FLOAT8, targets=(torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2))
_casts("one_rounding", sources=(torch.float64, torch.int64, torch.int32), targets=_FLOATS)
_casts("to_e4m3", sources=(*_NARROW, torch.int16), targets=_FLOAT8[:1])
_casts("to_e4m3", "one_rounding", sources=(torch.float64, torch.int64), targets=_FLOAT8[:1])
_casts("float_to_integer", sources=(torch.float64, *_NARROW), targets=_INTEGERS)
_casts("float_to_integer", "from_float8", sources=_FLOAT8, targets=_INTEGERS)
_casts("saturate", sources=_NARROW, targets=_FLOATS, saturate=True)
_casts("saturate", sources=_INTEGERS, targets=_INTEGERS, saturate=True)
_casts("saturate", "one_rounding", sources=(torch.float64, torch.int64), targets=_FLOATS, saturate=True)
_casts("saturate", "to_e4m3", sources=(*_NARROW, torch.int16), targets=_FLOAT8[:1], saturate=True)
_casts("saturate", "float_to_integer", sources=(torch.float64, *_NARROW), targets=_INTEGERS, saturate=True)
