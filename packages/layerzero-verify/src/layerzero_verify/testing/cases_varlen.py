"""Cases of attention over packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group

__all__ = ["varlen_call"]

Pairs = Iterator[tuple[str, Maker]]

_QUERIES, _KEYS = (5, 0, 17, 1, 9), (5, 7, 23, 12, 9)


def varlen_call(
    spec: KernelSpec,
    *,
    queries: tuple[int, ...] = (7, 1, 19, 12),
    keys: tuple[int, ...] | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    index: torch.dtype = torch.int32,
    **options: Any,
) -> Maker:
    """A maker of varlen arguments; with `keys` left out queries and keys share their offsets."""
    dim = fit(spec, "head_dim", 64) if head_dim is None else head_dim
    kv = heads if kv_heads is None else kv_heads

    def make(draw: Draw) -> tuple[Any, ...]:
        offsets = [
            torch.tensor((0, *accumulate(lengths)), dtype=index, device=draw.device)
            for lengths in (queries, queries if keys is None else keys)
        ]
        if keys is None:
            offsets[1] = offsets[0]
        query, key, value = (
            draw.normal(sum(queries), heads, dim),
            draw.normal(sum(queries if keys is None else keys), kv, dim),
            draw.normal(sum(queries if keys is None else keys), kv, dim),
        )
        slopes = None
        if options.get("alibi"):
            slopes = torch.tensor([2.0 ** -(1 + i) for i in range(heads)], device=draw.device)
        return (
            query, key, value, *offsets, max(queries), max(queries if keys is None else keys),
            options.get("causal", False), options.get("scale"), options.get("window"), options.get("softcap"), slopes,
            options.get("lse", False),
        )  # fmt: skip

    return make


@group("result", "varlen_attention", every_dtype=True)
def _plain(spec: KernelSpec) -> Pairs:
    yield "self", varlen_call(spec)
    yield "cross_with_empty_sequences", varlen_call(spec, queries=_QUERIES, keys=_KEYS)
    yield "no_keys", varlen_call(spec, queries=(3, 4, 2), keys=(5, 0, 9))
    yield "equal_lengths", varlen_call(spec, queries=(6, 6, 6))
    yield "int64_offsets", varlen_call(spec, index=torch.int64)


@group("scale", "varlen_attention")
def _scale(spec: KernelSpec) -> Pairs:
    yield "explicit", varlen_call(spec, scale=0.37)


@group("gqa", "varlen_attention", "gqa")
def _gqa(spec: KernelSpec) -> Pairs:
    yield "two_per_kv_head", varlen_call(spec, heads=4, kv_heads=2)
    yield "one_kv_head", varlen_call(spec, heads=4, kv_heads=1, queries=_QUERIES, keys=_KEYS)


def _causal(spec: KernelSpec, causal: bool | str) -> Pairs:
    yield "square", varlen_call(spec, causal=causal)
    yield "more_keys", varlen_call(spec, queries=_QUERIES, keys=_KEYS, causal=causal)
    yield "more_queries", varlen_call(spec, queries=(9, 4, 12), keys=(3, 4, 7), causal=causal)


@group("causal_top_left", "varlen_attention", "causal_top_left")
def _top_left(spec: KernelSpec) -> Pairs:
    return _causal(spec, True)


@group("causal_bottom_right", "varlen_attention", "causal_bottom_right")
def _bottom_right(spec: KernelSpec) -> Pairs:
    return _causal(spec, "bottom_right")


@group("window", "varlen_attention", "window")
def _window(spec: KernelSpec) -> Pairs:
    yield "both_sides", varlen_call(spec, window=(5, 3))
    yield "left_only", varlen_call(spec, queries=_QUERIES, keys=_KEYS, window=(4, -1))
    if "causal_bottom_right" in spec.features:
        yield "causal", varlen_call(spec, queries=_QUERIES, keys=_KEYS, window=(3, 0), causal="bottom_right")


@group("softcap", "varlen_attention", "softcap")
def _softcap(spec: KernelSpec) -> Pairs:
    yield "tight", varlen_call(spec, softcap=1.5, scale=0.5)


@group("alibi", "varlen_attention", "alibi")
def _alibi(spec: KernelSpec) -> Pairs:
    yield "per_head", varlen_call(spec, alibi=True)
    yield "more_keys", varlen_call(spec, queries=_QUERIES, keys=_KEYS, alibi=True)


@group("lse", "varlen_attention", "lse")
def _lse(spec: KernelSpec) -> Pairs:
    yield "plain", varlen_call(spec, lse=True)
    yield "no_keys", varlen_call(spec, queries=(3, 4, 2), keys=(5, 0, 9), lse=True)


@group("sizes", "varlen_attention")
def _sizes(spec: KernelSpec) -> Pairs:
    for head_dim in edges(spec, "head_dim"):
        yield f"head_dim_{head_dim}", varlen_call(spec, queries=(5, 3), heads=2, head_dim=head_dim)
