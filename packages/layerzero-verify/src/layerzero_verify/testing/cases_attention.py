"""Cases of attention: dense, over pages, packed, grouped and latent."""

from __future__ import annotations

from typing import Any

from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Calls, Labelled, edges, fit

_CAUSAL = {"causal_top_left": Causal.TOP_LEFT, "causal_bottom_right": Causal.BOTTOM_RIGHT}
_BOTTOM_RIGHT = Causal.BOTTOM_RIGHT

# -- dense -------------------------------------------------------------------------------------------
attention = Calls("attention", rank=4, batch=2, num_heads=4, seq_len_q=19, head_dim=64)
attention("result", "prefill")
attention("result", "one_query", seq_len_q=1, seq_len_k=33)
attention("result", "cross", seq_len_q=13, seq_len_k=29)
attention("result", "single_head", batch=1, num_heads=1)
attention("accumulation", "many_keys", batch=1, num_heads=2, seq_len_q=3, seq_len_k=512, head_dim=32, positive=True)
attention("gqa", "two_per_kv_head", "gqa", num_kv_heads=2)
attention("gqa", "three_per_kv_head", "gqa", num_heads=6, num_kv_heads=2)
attention("gqa", "one_kv_head", "gqa", num_kv_heads=1)
attention("mask_bool", "per_batch", "mask_bool", mask=MaskKind.BOOL, mask_for="batch")
attention("mask_bool", "shared", "mask_bool", mask=MaskKind.BOOL, mask_for="all", seq_len_q=11, seq_len_k=17)
attention("dead_row", "row_1", "mask_bool", mask=MaskKind.BOOL, mask_for="batch", dead_row=True)
attention("mask_float", "per_head", "mask_float", mask=MaskKind.FLOAT, mask_for="heads", masked=True)
attention("causal_square", "square", "causal_square", causal=Causal.TOP_LEFT)
for _word, _causal in _CAUSAL.items():
    attention(_word, "square", _word, causal=_causal)
    attention(_word, "more_keys", _word, causal=_causal, seq_len_q=9, seq_len_k=23, unless_square=True)
    attention(_word, "more_queries", _word, causal=_causal, seq_len_q=23, seq_len_k=9, unless_square=True)
attention("window", "both_sides", "window", seq_len_q=31, window=(5, 3))
attention("window", "left_only", "window", seq_len_q=31, window=(7, -1))
attention(
    "window", "causal", "window", "causal_bottom_right",
    seq_len_q=15, seq_len_k=31, window=(6, 0), causal=_BOTTOM_RIGHT,
)  # fmt: skip
attention("softcap", "tight", "softcap", softcap=1.5, scale=0.5)
attention("alibi", "per_head", "alibi")
attention("alibi", "more_keys", "alibi", seq_len_q=9, seq_len_k=23)
attention("sinks", "per_head", "sinks")
attention("sinks", "one_query", "sinks", seq_len_q=1, seq_len_k=33)
attention("sinks", "causal", "sinks", "causal_bottom_right", seq_len_q=9, seq_len_k=23, causal=_BOTTOM_RIGHT)
attention("sinks", "lse", "sinks", "lse", seq_len_q=5, seq_len_k=23)
attention("lse", "plain", "lse")
attention("lse", "causal", "lse", "causal_bottom_right", seq_len_q=9, seq_len_k=23, causal=_BOTTOM_RIGHT)
attention("dropout", "half", "dropout", batch=4, num_heads=8, seq_len_q=64, dropout=True, dropout_p=0.5)


@attention.each("scale")
def _scales(spec: KernelSpec) -> Labelled:
    yield "explicit", {"scale": 0.37}
    yield "default", {"head_dim": max(fit(spec, "head_dim", 32), fit(spec, "head_dim", 128))}
    if spec.features & {"causal_square", *_CAUSAL}:
        # A kernel that scales after masking turns -inf into something else.
        yield "negative_causal", {"scale": -0.37, "causal": Causal.TOP_LEFT}
        yield "zero_causal", {"scale": 0.0, "causal": Causal.TOP_LEFT}


@attention.each("block_mask", "block_mask")
def _block_masks(spec: KernelSpec) -> Labelled:
    rows, cols = fit(spec, "mask_block_q", 8), fit(spec, "mask_block_k", 8)
    blocks = {"mask_block_q": rows, "mask_block_k": cols}
    yield "shared", {**blocks, "seq_len_q": 3 * rows, "seq_len_k": 5 * cols}
    # The last blocks reach beyond the end.
    yield "per_head", {**blocks, "seq_len_q": 3 * rows - 5, "mask_for": "heads"}


@attention.each("chunk_mask", "chunk_mask")
def _chunk_masks(spec: KernelSpec) -> Labelled:
    size = fit(spec, "mask_chunk", 8)
    lengths = {
        "square": (3 * size + 3, 3 * size + 3),
        "more_keys": (size + 2, 3 * size + 3),
        "more_queries": (2 * size + 3, size + 1),
        "one_query": (1, 3 * size + 3),
    }
    for label, (rows, cols) in lengths.items():
        if not spec.square or label == "square":
            yield label, {"mask_chunk": size, "seq_len_q": rows, "seq_len_k": cols}


@attention.each("window", "window")
def _windows_of_models(spec: KernelSpec) -> Labelled:
    for size, length in ((256, 300), (1024, 1100)):
        if fit(spec, "seq_len_k", length) == length and not spec.square:
            few = {"batch": 1, "num_heads": 2, "seq_len_q": 20, "seq_len_k": length}
            yield f"left_{size}", {**few, "window": (size, 0)}


attention.edges("head_dim", batch=1, num_heads=2, seq_len_q=7)
attention.edges("seq_len_q", "seq_len_k", batch=1, num_heads=1, seq_len_q=4, seq_len_k=8)


# -- over pages --------------------------------------------------------------------------------------
def _index(spec: KernelSpec) -> dict[str, Any]:
    return {"index_dtype": "int32" if not spec.index_dtypes or "int32" in spec.index_dtypes else "int64"}


def layouts_of(spec: KernelSpec) -> list[Layout]:
    """The layouts of a cache that a kernel reads."""
    return sorted(spec.kv_cache_layouts) or [Layout.NHD]


paged = Calls(
    "paged_attention",
    lambda spec: {**_index(spec), "kv_cache_layout": layouts_of(spec)[0]},
    num_heads=4, head_dim=64, page_size=16, contexts=(7, 33, 1),
)  # fmt: skip
paged("scale", "explicit", scale=0.37)
paged("gqa", "two_per_kv_head", "gqa", num_kv_heads=2)
paged("lse", "decode", "lse")
paged("window", "left_5", "window", contexts=(40, 3, 17), window=(5, 0))
paged("window", "left_20", "window", "paged_prefill", contexts=(40, 3, 17), queries=(9, 3, 1), window=(20, 0))
paged("softcap", "tight", "softcap", softcap=1.5, scale=0.5)
paged("sinks", "decode", "sinks")
paged("sinks", "window", "sinks", "window", "lse", contexts=(40, 3, 17), window=(5, 0))
paged("sinks", "mixed", "sinks", "paged_prefill", contexts=(9, 33, 5), queries=(4, 1, 5))
paged("non_causal", "mixed", "non_causal", "paged_prefill", contexts=(9, 33, 5), queries=(4, 1, 5), causal=Causal.NONE)
paged("non_causal", "cross", "non_causal", "paged_prefill", contexts=(3, 33, 0), queries=(9, 1, 2), causal=Causal.NONE)
paged("kv_scales", "per_tensor", "kv_scales")
paged("kv_scales", "per_head", "kv_scales", "paged_prefill", contexts=(9, 33), queries=(4, 1), scales_for="heads")
paged("alibi", "per_head", "alibi")
paged("alibi", "per_sequence", "alibi", slopes_for="batch")


@paged.each("result")
def _decode(spec: KernelSpec) -> Labelled:
    for layout in layouts_of(spec):
        yield f"decode_{layout.value}", {"kv_cache_layout": layout}


@paged.each("result", "paged_prefill")
def _prefill(spec: KernelSpec) -> Labelled:
    for layout in layouts_of(spec):
        yield f"mixed_{layout.value}", {"kv_cache_layout": layout, "contexts": (9, 33, 5), "queries": (4, 1, 5)}


@paged.each("sizes")
def _pages_of_servers(spec: KernelSpec) -> Labelled:
    for page in (1, 16, 128):
        if fit(spec, "page_size", page) == page:
            yield f"pages_of_{page}", {"page_size": page, "contexts": (page + 1, 2)}


latent = Calls(
    "mla_paged_attention",
    _index,
    num_heads=4, head_dim_ckv=64, head_dim_kpe=16, page_size=16, contexts=(7, 33, 1), scale=0.1,
)  # fmt: skip
latent("result", "decode")
latent("result", "mixed", "paged_prefill", contexts=(9, 33, 5), queries=(4, 1, 5))
latent("scale", "small", scale=0.02)
latent("scale", "negative", scale=-0.1)
latent("lse", "decode", "lse")
latent("sizes", "deepseek", head_dim_ckv=512, head_dim_kpe=64)


@latent.each("sizes")
@paged.each("sizes")
def _page_sizes(spec: KernelSpec) -> Labelled:
    for page in edges(spec, "page_size"):
        yield f"page_{page}", {"page_size": page, "contexts": (2 * page + 1, page)}


# -- packed ------------------------------------------------------------------------------------------
_CROSS: dict[str, Any] = {"queries": (5, 0, 17, 1, 9), "keys": (5, 7, 23, 12, 9)}
_NO_KEYS: dict[str, Any] = {"queries": (3, 4, 2), "keys": (5, 0, 9)}

varlen = Calls("varlen_attention", num_heads=4, head_dim=64, queries=(7, 1, 19, 12))
varlen("result", "self")
varlen("result", "cross_with_empty_sequences", **_CROSS)
varlen("result", "no_keys", **_NO_KEYS)
varlen("result", "equal_lengths", queries=(6, 6, 6))
varlen("result", "int64_offsets", index_dtype="int64")
varlen("scale", "explicit", scale=0.37)
varlen("gqa", "two_per_kv_head", "gqa", num_kv_heads=2)
varlen("gqa", "one_kv_head", "gqa", num_kv_heads=1, **_CROSS)
for _word, _causal in _CAUSAL.items():
    varlen(_word, "square", _word, causal=_causal)
    varlen(_word, "more_keys", _word, causal=_causal, **_CROSS)
    varlen(_word, "more_queries", _word, causal=_causal, queries=(9, 4, 12), keys=(3, 4, 7))
varlen("window", "both_sides", "window", window=(5, 3))
varlen("window", "left_only", "window", window=(4, -1), **_CROSS)
varlen("window", "causal", "window", "causal_bottom_right", window=(3, 0), causal=_BOTTOM_RIGHT, **_CROSS)
varlen("softcap", "tight", "softcap", softcap=1.5, scale=0.5)
varlen("alibi", "per_head", "alibi")
varlen("alibi", "more_keys", "alibi", **_CROSS)
varlen("sinks", "per_head", "sinks")
varlen("sinks", "causal", "sinks", "causal_bottom_right", causal=_BOTTOM_RIGHT, **_CROSS)
varlen("sinks", "no_keys", "sinks", "lse", **_NO_KEYS)
varlen("lse", "plain", "lse")
varlen("lse", "no_keys", "lse", **_NO_KEYS)
varlen.edges("head_dim", queries=(5, 3), num_heads=2)


# -- grouped: queries and prefixes of each group and sequence, keys of each sequence -------------------
grouped = Calls(
    "grouped_attention",
    _index,
    num_heads=4, head_dim=64, queries=((3, 5), (4, 2)), keys=(9, 13), prefixes=((5, 6), (9, 13)),
)  # fmt: skip
grouped("result", "two_groups")
grouped("result", "same_keys", prefixes=((9, 13), (9, 13)))
grouped("result", "one_group", queries=((5, 7),), prefixes=((9, 13),))
grouped("result", "empty_parts", queries=((0, 5), (4, 2)), keys=(0, 13), prefixes=((0, 6), (0, 13)))
grouped(
    "accumulation", "many_keys",
    num_heads=2, head_dim=32, queries=((2,), (3,)), keys=(512,), prefixes=((500,), (512,)), positive=True,
)  # fmt: skip
grouped("scale", "explicit", scale=0.37)
grouped("scale", "negative", "causal_bottom_right", scale=-0.2, causal=_BOTTOM_RIGHT)
grouped("gqa", "two_per_kv_head", "gqa", num_kv_heads=2)
grouped("gqa", "three_per_kv_head", "gqa", num_heads=6, num_kv_heads=2)
grouped("gqa", "one_kv_head", "gqa", num_kv_heads=1)
grouped("causal_bottom_right", "more_keys", "causal_bottom_right", causal=_BOTTOM_RIGHT)
grouped("causal_bottom_right", "more_queries", "causal_bottom_right", causal=_BOTTOM_RIGHT, queries=((8, 5), (4, 15)))
grouped("causal_bottom_right", "equal_lengths", "causal_bottom_right", causal=_BOTTOM_RIGHT, queries=((5, 6), (9, 13)))
grouped("lse", "plain", "lse")
grouped("lse", "causal", "lse", "causal_bottom_right", causal=_BOTTOM_RIGHT, queries=((8, 5), (4, 2)))
grouped.edges("head_dim", num_heads=2)
