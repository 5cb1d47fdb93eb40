"""Long sums of numbers of one sign: what a sum kept in a narrow type cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, fit, group
from layerzero_verify.testing.weights import weight_for

__all__: list[str] = []

Pairs = Iterator[tuple[str, Maker]]


def _positive(draw: Draw, *shape: int) -> Tensor:
    return draw.normal(*shape).abs() * 0.25 + 0.5


@group("accumulation", "linear", every_dtype=True)
def _linear(spec: KernelSpec) -> Pairs:
    width = fit(spec, "k", 4096)

    def make(draw: Draw) -> tuple[Any, ...]:
        weight = weight_for(spec, _positive(draw, fit(spec, "n", 8), width) / 64)
        return _positive(draw, fit(spec, "rows", 3), width), weight, None, None

    yield "long_product", make


@group("accumulation", "attention", every_dtype=True)
def _attention(spec: KernelSpec) -> Pairs:
    dim, heads, keys = fit(spec, "head_dim", 32), fit(spec, "num_heads", 2), fit(spec, "seq_len_k", 512)
    queries, batch = keys if spec.square else fit(spec, "seq_len_q", 3), fit(spec, "batch", 1)

    def make(draw: Draw) -> tuple[Any, ...]:
        query = draw.normal(batch, heads, queries, dim, scale=0.1)
        key = draw.normal(batch, heads, keys, dim, scale=0.1)
        return query, key, _positive(draw, batch, heads, keys, dim), None, 0.0, False, None, None, None, None, False

    yield "many_keys", make
