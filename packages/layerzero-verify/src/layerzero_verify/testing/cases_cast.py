"""Cases of conversions: every pair of dtypes, with numbers that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, group

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


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
