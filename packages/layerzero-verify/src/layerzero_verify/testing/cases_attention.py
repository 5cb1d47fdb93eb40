"""Cases of attention and paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from layerzero.model.kernel import KernelSpec
from layerzero.model.kv_cache import make_paged_batch
from layerzero_verify.testing.cases import Draw, Maker, edges, fit, group

__all__ = ["attention_call", "paged_call"]

Pairs = Iterator[tuple[str, Maker]]


def attention_call(
    spec: KernelSpec,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    seq_q: int = 19,
    seq_k: int | None = None,
    head_dim: int | None = None,
    mask: str | None = None,
    **options: Any,
) -> Maker:
    """A maker of attention arguments; sizes move to what the kernel's limits allow."""
    batch = fit(spec, "batch", batch)
    heads = fit(spec, "num_heads", heads)
    kv_heads = heads if kv_heads is None else kv_heads
    seq_q = fit(spec, "seq_len_q", seq_q)
    seq_k = seq_q if seq_k is None else fit(spec, "seq_len_k", seq_k)
    if spec.square:
        seq_k = seq_q
    dim = fit(spec, "head_dim", 64) if head_dim is None else head_dim

    def make(draw: Draw) -> tuple[Any, ...]:
        query = draw.normal(batch, heads, seq_q, dim)
        key, value = draw.normal(batch, kv_heads, seq_k, dim), draw.normal(batch, kv_heads, seq_k, dim)
        attn_mask = None
        if mask in ("bool", "dead"):
            attn_mask = draw.bools(batch, 1, seq_q, seq_k)
            if mask == "dead":
                attn_mask[:, :, min(1, seq_q - 1)] = False
        elif mask == "bool_shared":
            attn_mask = draw.bools(1, 1, seq_q, seq_k)
        elif mask == "float":
            attn_mask = draw.normal(batch, heads, seq_q, seq_k).masked_fill(
                ~draw.bools(batch, 1, seq_q, seq_k), -torch.inf
            )
        slopes = None
        if options.get("alibi"):
            slopes = torch.tensor([2.0 ** -(1 + i) for i in range(heads)], device=draw.device)
        return (
            query, key, value, attn_mask, options.get("dropout", 0.0), options.get("causal", False),
            options.get("scale"), options.get("window"), options.get("softcap"), slopes, options.get("lse", False),
        )  # fmt: skip

    return make


@group("result", "attention", every_dtype=True)
def _plain(spec: KernelSpec) -> Pairs:
    yield "prefill", attention_call(spec)
    yield "one_query", attention_call(spec, seq_q=1, seq_k=33)
    yield "cross", attention_call(spec, seq_q=13, seq_k=29)
    yield "single_head", attention_call(spec, batch=1, heads=1)


@group("scale", "attention")
def _scale(spec: KernelSpec) -> Pairs:
    yield "explicit", attention_call(spec, scale=0.37)
    yield "default", attention_call(spec, head_dim=max((fit(spec, "head_dim", 32), fit(spec, "head_dim", 128))))
    if spec.features & {"causal_top_left", "causal_bottom_right", "causal_square"}:
        # A kernel that scales after masking turns -inf into something else.
        yield "negative_causal", attention_call(spec, scale=-0.37, causal=True)
        yield "zero_causal", attention_call(spec, scale=0.0, causal=True)


@group("gqa", "attention", "gqa")
def _gqa(spec: KernelSpec) -> Pairs:
    yield "two_per_kv_head", attention_call(spec, heads=4, kv_heads=2)
    yield "three_per_kv_head", attention_call(spec, heads=6, kv_heads=2)
    yield "one_kv_head", attention_call(spec, heads=4, kv_heads=1)


@group("mask_bool", "attention", "mask_bool")
def _mask_bool(spec: KernelSpec) -> Pairs:
    yield "per_batch", attention_call(spec, mask="bool")
    yield "shared", attention_call(spec, mask="bool_shared", seq_q=11, seq_k=17)


@group("dead_row", "attention", "mask_bool")
def _dead(spec: KernelSpec) -> Pairs:
    yield "row_1", attention_call(spec, mask="dead")


@group("mask_float", "attention", "mask_float")
def _mask_float(spec: KernelSpec) -> Pairs:
    yield "per_head", attention_call(spec, mask="float")


def _causal(spec: KernelSpec, causal: bool | str) -> Pairs:
    yield "square", attention_call(spec, causal=causal)
    if not spec.square:
        yield "more_keys", attention_call(spec, seq_q=9, seq_k=23, causal=causal)
        yield "more_queries", attention_call(spec, seq_q=23, seq_k=9, causal=causal)


@group("causal_top_left", "attention", "causal_top_left")
def _top_left(spec: KernelSpec) -> Pairs:
    return _causal(spec, True)


@group("causal_square", "attention", "causal_square")
def _square(spec: KernelSpec) -> Pairs:
    yield "square", attention_call(spec, causal=True)


@group("causal_bottom_right", "attention", "causal_bottom_right")
def _bottom_right(spec: KernelSpec) -> Pairs:
    return _causal(spec, "bottom_right")


@group("window", "attention", "window")
def _window(spec: KernelSpec) -> Pairs:
    yield "both_sides", attention_call(spec, seq_q=31, window=(5, 3))
    yield "left_only", attention_call(spec, seq_q=31, window=(7, -1))
    if "causal_bottom_right" in spec.features:
        yield "causal", attention_call(spec, seq_q=15, seq_k=31, window=(6, 0), causal="bottom_right")


@group("softcap", "attention", "softcap")
def _softcap(spec: KernelSpec) -> Pairs:
    yield "tight", attention_call(spec, softcap=1.5, scale=0.5)


@group("alibi", "attention", "alibi")
def _alibi(spec: KernelSpec) -> Pairs:
    yield "per_head", attention_call(spec, alibi=True)
    yield "more_keys", attention_call(spec, seq_q=9, seq_k=23, alibi=True)


@group("lse", "attention", "lse")
def _lse(spec: KernelSpec) -> Pairs:
    yield "plain", attention_call(spec, lse=True)
    if "causal_bottom_right" in spec.features:
        yield "causal", attention_call(spec, seq_q=9, seq_k=23, lse=True, causal="bottom_right")


@group("dropout", "attention", "dropout")
def _dropout(spec: KernelSpec) -> Pairs:
    yield "half", attention_call(spec, batch=4, heads=8, seq_q=64, dropout=0.5)


@group("sizes", "attention")
def _sizes(spec: KernelSpec) -> Pairs:
    for head_dim in edges(spec, "head_dim"):
        yield f"head_dim_{head_dim}", attention_call(spec, batch=1, heads=2, seq_q=7, head_dim=head_dim)
    for length in edges(spec, "seq_len_q"):
        yield (
            f"seq_len_q_{length}",
            attention_call(spec, batch=1, heads=1, seq_q=length, seq_k=fit(spec, "seq_len_k", 8)),
        )
    for length in edges(spec, "seq_len_k"):
        yield (
            f"seq_len_k_{length}",
            attention_call(spec, batch=1, heads=1, seq_q=fit(spec, "seq_len_q", 4), seq_k=length),
        )


def paged_call(
    spec: KernelSpec,
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    contexts: tuple[int, ...] = (7, 33, 1),
    queries: tuple[int, ...] | None = None,
    layout: str = "NHD",
    page: int | None = None,
    lse: bool = False,
    **options: Any,
) -> Maker:
    """A maker of paged attention arguments with shuffled pages."""
    kv_heads = heads if kv_heads is None else kv_heads
    page = fit(spec, "page_size", 16) if page is None else page
    dim = fit(spec, "head_dim", 64)

    def make(draw: Draw) -> tuple[Any, ...]:
        index = torch.int32 if not spec.index_dtypes or "int32" in spec.index_dtypes else torch.int64
        per_row = max(-(-length // page) for length in contexts)
        blocks = per_row * len(contexts) + 1
        tables = draw.permutation(blocks, index)[: per_row * len(contexts)].reshape(len(contexts), per_row)
        shape = (blocks, page, kv_heads, dim) if layout == "NHD" else (blocks, kv_heads, page, dim)
        key_cache, value_cache = draw.normal(*shape), draw.normal(*shape)
        lens = torch.tensor(contexts, dtype=index, device=draw.device)
        new = None if queries is None else torch.tensor(queries, dtype=index, device=draw.device)
        query = draw.normal(len(contexts) if queries is None else sum(queries), heads, dim)
        batch = make_paged_batch(tables, lens, new)
        return (
            query, key_cache, value_cache, batch, options.get("scale"), options.get("window"), options.get("softcap"),
            None, lse, layout,
        )  # fmt: skip

    return make


def _cache_layouts(spec: KernelSpec) -> tuple[str, ...]:
    return tuple(sorted(item.value for item in spec.kv_cache_layouts)) or ("NHD",)


@group("result", "paged_attention", every_dtype=True)
def _paged(spec: KernelSpec) -> Pairs:
    for layout in _cache_layouts(spec):
        yield f"decode_{layout}", paged_call(spec, layout=layout)
        if "paged_prefill" in spec.features:
            yield f"mixed_{layout}", paged_call(spec, layout=layout, contexts=(9, 33, 5), queries=(4, 1, 5))


@group("scale", "paged_attention")
def _paged_scale(spec: KernelSpec) -> Pairs:
    yield "explicit", paged_call(spec, scale=0.37, layout=_cache_layouts(spec)[0])


@group("gqa", "paged_attention", "gqa")
def _paged_gqa(spec: KernelSpec) -> Pairs:
    yield "two_per_kv_head", paged_call(spec, heads=4, kv_heads=2, layout=_cache_layouts(spec)[0])


@group("lse", "paged_attention", "lse")
def _paged_lse(spec: KernelSpec) -> Pairs:
    yield "decode", paged_call(spec, lse=True, layout=_cache_layouts(spec)[0])


@group("sizes", "paged_attention")
def _paged_sizes(spec: KernelSpec) -> Pairs:
    for page in edges(spec, "page_size"):
        yield f"page_{page}", paged_call(spec, page=page, contexts=(2 * page + 1, page), layout=_cache_layouts(spec)[0])
