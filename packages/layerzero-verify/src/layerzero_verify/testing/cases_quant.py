"""Cases of linear layers with quantized weights: every declared format and granularity, zero points, activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerzero.backends.reference.quantize import quantize
from layerzero.model.kernel import KernelSpec
from layerzero.model.quant import QuantScheme
from layerzero_verify.testing.cases import Draw, Maker, fit, group
from layerzero_verify.testing.weights import schemes_of, weight_for

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


def _product(spec: KernelSpec, scheme: QuantScheme, act: str | None) -> Maker:
    width, rows, outputs = fit(spec, "k", 128), fit(spec, "rows", 3), fit(spec, "n", 48)

    def make(draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(rows, width)
        return x, weight_for(spec, draw.normal(outputs, width, scale=0.1), scheme, act), None, None

    return make


def _schemes(spec: KernelSpec, act: str | None, *, symmetric: bool = True) -> Pairs:
    for scheme in schemes_of(spec, symmetric=symmetric):
        if act is None or scheme.fmt.value not in ("int4", "nf4"):
            yield f"{scheme.fmt.value}_{scheme.granularity}", _product(spec, scheme, act)


@group("quantized_weight", "linear", "weight_only", every_dtype=True)
def _weight_only(spec: KernelSpec) -> Pairs:
    yield from _schemes(spec, None)


@group("quantized_weight", "linear", "weight_only", "zero_point")
def _zero_points(spec: KernelSpec) -> Pairs:
    for label, make in _schemes(spec, None, symmetric=False):
        yield f"{label}_zero_point", make


@group("quantized_weight", "linear", "act_dynamic", every_dtype=True)
def _activations(spec: KernelSpec) -> Pairs:
    for label, make in _schemes(spec, "dynamic"):
        yield f"{label}_activations", make


@group("dequantized", "dequantize", every_dtype=True)
def _dequantize(spec: KernelSpec) -> Pairs:
    for scheme in schemes_of(spec):

        def make(draw: Draw, scheme: QuantScheme = scheme) -> tuple[Any, ...]:
            return quantize(draw.normal(6, 256), scheme), draw.dtype

        yield f"{scheme.fmt.value}_{scheme.granularity}", make
