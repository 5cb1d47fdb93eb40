"""Cases of grouped attention and of latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kernel import KernelSpec
from layerzero.model.kv_cache import make_paged_batch
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group

__all__ = ["grouped_call", "mla_call"]

Pairs = Iterator[tuple[str, Maker]]


def _index(spec: KernelSpec) -> torch.dtype:
    return torch.int32 if not spec.index_dtypes or "int32" in spec.index_dtypes else torch.int64


def grouped_call(
    spec: KernelSpec,
    *,
    queries: Sequence[Sequence[int]] = ((3, 5), (4, 2)),
    lengths: Sequence[int] = (9, 13),
    prefixes: Sequence[Sequence[int]] = ((5, 6), (9, 13)),
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    lse: bool = False,
) -> Maker:
    """A maker of grouped attention arguments: queries and prefixes [G][B], lengths of the sequences [B]."""
    heads = fit(spec, "num_heads", heads)
    kv_heads = heads if kv_heads is None else kv_heads
    dim = fit(spec, "head_dim", 64) if head_dim is None else head_dim
    offsets_q, offsets_k = ([0, *accumulate(items)] for items in (chain(*queries), lengths))

    def make(draw: Draw) -> tuple[Any, ...]:
        index = _index(spec)
        parts = [torch.tensor(n, dtype=index, device=draw.device) for n in (offsets_q, offsets_k, prefixes)]
        batch = make_grouped_batch(parts[0], parts[1], parts[2])
        query = draw.normal(offsets_q[-1], heads, dim)
        key, value = draw.normal(offsets_k[-1], kv_heads, dim), draw.normal(offsets_k[-1], kv_heads, dim)
        return query, key, value, batch, causal, scale, lse

    return make


@group("result", "grouped_attention", every_dtype=True)
def _grouped(spec: KernelSpec) -> Pairs:
    yield "two_groups", grouped_call(spec)
    yield "same_keys", grouped_call(spec, prefixes=((9, 13), (9, 13)))
    yield "one_group", grouped_call(spec, queries=((5, 7),), prefixes=((9, 13),))
    yield "empty_parts", grouped_call(spec, queries=((0, 5), (4, 2)), lengths=(0, 13), prefixes=((0, 6), (0, 13)))


@group("scale", "grouped_attention")
def _grouped_scale(spec: KernelSpec) -> Pairs:
    yield "explicit", grouped_call(spec, scale=0.37)
    if "causal_bottom_right" in spec.features:
        yield "negative", grouped_call(spec, scale=-0.2, causal=True)


@group("gqa", "grouped_attention", "gqa")
def _grouped_gqa(spec: KernelSpec) -> Pairs:
    yield "two_per_kv_head", grouped_call(spec, heads=4, kv_heads=2)
    yield "three_per_kv_head", grouped_call(spec, heads=6, kv_heads=2)
    yield "one_kv_head", grouped_call(spec, heads=4, kv_heads=1)


@group("causal_bottom_right", "grouped_attention", "causal_bottom_right")
def _grouped_causal(spec: KernelSpec) -> Pairs:
    yield "more_keys", grouped_call(spec, causal=True)
    yield "more_queries", grouped_call(spec, queries=((8, 5), (4, 15)), causal=True)
    yield "equal_lengths", grouped_call(spec, queries=((5, 6), (9, 13)), causal=True)


@group("lse", "grouped_attention", "lse")
def _grouped_lse(spec: KernelSpec) -> Pairs:
    yield "plain", grouped_call(spec, lse=True)
    if "causal_bottom_right" in spec.features:
        yield "causal", grouped_call(spec, queries=((8, 5), (4, 2)), lse=True, causal=True)


@group("sizes", "grouped_attention")
def _grouped_sizes(spec: KernelSpec) -> Pairs:
    for head_dim in edges(spec, "head_dim"):
        yield f"head_dim_{head_dim}", grouped_call(spec, heads=2, head_dim=head_dim)


def mla_call(
    spec: KernelSpec,
    *,
    heads: int = 4,
    contexts: tuple[int, ...] = (7, 33, 1),
    queries: tuple[int, ...] | None = None,
    page: int | None = None,
    ckv: int | None = None,
    kpe: int | None = None,
    scale: float = 0.1,
    lse: bool = False,
) -> Maker:
    """A maker of latent attention arguments with shuffled pages."""
    heads = fit(spec, "num_heads", heads)
    page = fit(spec, "page_size", 16) if page is None else page
    ckv = fit(spec, "head_dim_ckv", 64) if ckv is None else ckv
    kpe = fit(spec, "head_dim_kpe", 16) if kpe is None else kpe

    def make(draw: Draw) -> tuple[Any, ...]:
        index = _index(spec)
        per_row = max(-(-length // page) for length in contexts)
        blocks = per_row * len(contexts) + 1
        tables = draw.permutation(blocks, index)[: per_row * len(contexts)].reshape(len(contexts), per_row)
        tokens = len(contexts) if queries is None else sum(queries)
        new = None if queries is None else torch.tensor(queries, dtype=index, device=draw.device)
        batch = make_paged_batch(tables, torch.tensor(contexts, dtype=index, device=draw.device), new)
        tensors = ((tokens, heads, ckv), (tokens, heads, kpe), (blocks, page, ckv), (blocks, page, kpe))
        return *(draw.normal(*shape) for shape in tensors), batch, scale, lse

    return make


@group("result", "mla_paged_attention", every_dtype=True)
def _mla(spec: KernelSpec) -> Pairs:
    yield "decode", mla_call(spec)
    if "paged_prefill" in spec.features:
        yield "mixed", mla_call(spec, contexts=(9, 33, 5), queries=(4, 1, 5))


@group("scale", "mla_paged_attention")
def _mla_scale(spec: KernelSpec) -> Pairs:
    yield "small", mla_call(spec, scale=0.02)
    yield "negative", mla_call(spec, scale=-0.1)


@group("lse", "mla_paged_attention", "lse")
def _mla_lse(spec: KernelSpec) -> Pairs:
    yield "decode", mla_call(spec, lse=True)


@group("sizes", "mla_paged_attention")
def _mla_sizes(spec: KernelSpec) -> Pairs:
    yield "deepseek", mla_call(spec, ckv=fit(spec, "head_dim_ckv", 512), kpe=fit(spec, "head_dim_kpe", 64))
    for page in edges(spec, "page_size"):
        yield f"page_{page}", mla_call(spec, page=page, contexts=(2 * page + 1, page))


@group("accumulation", "grouped_attention", every_dtype=True)
def _grouped_many_keys(spec: KernelSpec) -> Pairs:
    dim, heads = fit(spec, "head_dim", 32), fit(spec, "num_heads", 2)
    plain = grouped_call(
        spec, heads=heads, head_dim=dim, queries=((2,), (3,)), lengths=(512,), prefixes=((500,), (512,))
    )

    def make(draw: Draw) -> tuple[Any, ...]:
        query, key, value, *rest = plain(draw)
        return query * 0.1, key * 0.1, value.abs() * 0.25 + 0.5, *rest

    yield "many_keys", make
