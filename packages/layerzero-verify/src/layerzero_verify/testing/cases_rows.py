"""Cases of what works on rows and on tokens: norms, activations, positions, products, sampling, routing, experts."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from layerzero.model.enums import Layout, QuantFormat
from layerzero.model.kernel import KernelSpec
from layerzero.model.quant import FORMATS, QuantScheme
from layerzero_verify.testing.cases import Calls, Given, Labelled, edges, fit

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


# -- norms -------------------------------------------------------------------------------------------
def _norms(op: str) -> None:
    biased = op == "layer_norm"
    norm = Calls(op, lambda spec: {"needs": spec.features & {"bias"} if biased else ()}, rank=2, rows=4, hidden=64)
    norm("result", "rows", rows=5, hidden=96)
    norm("result", "tokens", rows=6, hidden=160, rank=3)
    # Numbers so small that where eps stands decides the result.
    norm("eps", "small_rows", eps=1e-3, magnitude=1e-2)
    norm("mixed_weight", "other_dtype", "mixed_weight")
    if op in ("rms_norm", "layer_norm"):
        norm("no_weight", "plain", "no_weight", needs=())
    if op in ("rms_norm", "add_rms_norm"):
        norm("accumulation", "long_row", rows=3, hidden=2048, positive=True)
    norm.edges("hidden", rows=3)


for _op in ("rms_norm", "add_rms_norm", "layer_norm", "gemma_rms_norm", "gemma_add_rms_norm"):
    _norms(_op)

# -- gated activations and the look-up ---------------------------------------------------------------
for _op, _label, _needs in (
    ("silu_and_mul", "plain", ()),
    ("relu_and_mul", "plain", ()),
    ("gelu_and_mul", "erf", ("gelu_none",)),
    ("gelu_and_mul", "tanh", ("gelu_tanh",)),
):
    Calls(_op, rank=3, rows=15, hidden=48)("result", _label, *_needs)
Calls("embedding", rank=2, tokens=24, vocab=37, hidden=32)("result", "plain")


# -- RoPE and XPos -----------------------------------------------------------------------------------
def _layouts(spec: KernelSpec) -> list[Layout]:
    return sorted(spec.layouts) or [Layout.BHSD]


def _rotary_usual(spec: KernelSpec) -> Given:
    dim = fit(spec, "head_dim", 64)
    tables = {} if spec.mixed_dtypes is False else {"tables": torch.float32}
    return {"layout": _layouts(spec)[0], "head_dim": dim, "rotary_dim": dim, **tables}


def _rotary(op: str, convention: str, options: tuple[str, ...]) -> None:
    rotary = Calls(op, _rotary_usual, batch=2, num_heads=4, num_kv_heads=2, seq_len_q=7)

    @rotary.each("result", convention)
    def _plain(spec: KernelSpec) -> Labelled:
        if convention == "interleaved":
            yield convention, {}
        else:
            yield from ((f"{convention}_{layout.value}", {"layout": layout}) for layout in _layouts(spec))

    for feature in options:

        @rotary.each("rope_options", feature, convention)
        def _option(spec: KernelSpec, feature: str = feature) -> Labelled:
            part = {"rotary_dim": fit(spec, "head_dim", 64) // 2} if feature == "partial_rotary" else {}
            for layout in _layouts(spec):
                yield f"{convention}_{feature}_{layout.value}", {**part, "layout": layout}
            if convention == "rotate_half":
                yield f"{feature}_one_token", {**part, "seq_len_q": 1}


_ROTARY = ("no_key", "batched_tables", "position_ids", "partial_rotary")
for _op, _convention in product(("rope", "xpos"), ("rotate_half", "interleaved")):
    _rotary(_op, _convention, (*_ROTARY, "inplace") if _op == "rope" else _ROTARY)

# -- cross-entropy -----------------------------------------------------------------------------------
loss = Calls("cross_entropy", rank=3, rows=15, vocab=37, index_dtype="int64", magnitude=3.0, ignored="some")
loss("result", "mean")
loss("result", "sum", reduction="sum", ignored="none")
loss("result", "none", reduction="none", index_dtype="int32")
loss("result", "all_ignored", ignored="all")
_LOSS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "z_loss": {"z_loss": 1e-2},
    "lse": {"lse": None},
    "all": {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 1e-3, "lse": None},
}
for (_label, _options), _reduction in product(_LOSS.items(), ("mean", "none")):
    loss("loss_options", f"{_label}_{_reduction}", *_options, reduction=_reduction, **_options)


# -- products: a weight as it is, quantized, or packed by the kernel's own packer --------------------------
def schemes_of(spec: KernelSpec, *, symmetric: bool = True) -> list[QuantScheme]:
    """Every format and granularity a kernel declares, blocks of a size it takes."""
    found = []
    for fmt in sorted(QuantFormat(word) for word in spec.quant_formats):
        traits = FORMATS[fmt]
        if not symmetric and not traits.zero_point:
            continue
        for granularity in sorted(spec.granularities):
            if traits.block_only and granularity != "block":
                continue
            block = None
            if granularity == "block":
                block = traits.block_size if traits.block_only else fit(spec, "block", 32)
            found.append(QuantScheme(fmt, granularity, block, symmetric))
    return found


def weight_given(spec: KernelSpec, scheme: QuantScheme | None = None, **sizes: int) -> dict[str, Any]:
    """What a case says of a weight; without a scheme it is the first that the kernel of `linear` declares, or none.

    Sizes of an inner axis are made whole blocks, two or more.
    """
    needs: tuple[str, ...] = ()
    if scheme is None:
        scheme = next(iter(schemes_of(spec)), None)
        if scheme is None or "unquantized" in spec.features:
            return {}
        needs = () if "weight_only" in spec.features else ("act_dynamic",)
    step = scheme.block_size or 1
    return {name: size if name == "rows" else max(2, -(-size // step)) * step for name, size in sizes.items()} | {
        "quant_format": scheme.fmt.value,
        "granularity": scheme.granularity,
        "weight_layout": spec.weight_layout,
        "packer": spec.packer,
        "needs": needs,
        "block": scheme.block_size,
    }


linear = Calls("linear", weight_given, rank=2, rows=5, k=64, n=48)
linear("result", "plain")
linear("result", "bias", "bias")
linear("accumulation", "long_product", rows=3, k=4096, n=8, positive=True)
for _word in ACTIVATIONS:

    @linear.each("activation", f"activation_{_word}")
    def _activated(spec: KernelSpec, word: str = _word) -> Labelled:
        yield word, {"activation": word, "needs": {*weight_given(spec).get("needs", ()), *spec.features & {"bias"}}}


def quantized(calls: Calls, *features: str, suffix: str = "", symmetric: bool = True, **sizes: int) -> None:
    """A case for every scheme of a quantized weight."""
    act = "act_dynamic" in features

    @calls.each("quantized_weight", *features, every_dtype=symmetric)
    def _schemes(spec: KernelSpec) -> Labelled:
        for scheme in schemes_of(spec, symmetric=symmetric):
            if not act or scheme.fmt.value not in ("int4", "nf4"):
                yield f"{_words(scheme)}{suffix}", weight_given(spec, scheme, **sizes)


def _words(scheme: QuantScheme) -> str:
    return f"{scheme.fmt.value}_{scheme.granularity}"


quantized(linear, "weight_only", rows=3, k=128)
quantized(linear, "weight_only", "zero_point", suffix="_zero_point", symmetric=False, rows=3, k=128)
quantized(linear, "act_dynamic", suffix="_activations", rows=3, k=128)


@Calls("quantize", rank=2, rows=6, hidden=256).each("quantized")
def _quantize(spec: KernelSpec) -> Labelled:
    for fmt, granularity in product(sorted(spec.quant_formats), sorted(spec.granularities) or ["tensor"]):
        if fmt not in ("mxfp4", "nvfp4") or granularity != "channel":
            yield f"{fmt}_{granularity}", {"quant_format": fmt, "granularity": granularity}


@Calls("dequantize", rank=2, rows=6, hidden=256).each("dequantized")
def _dequantize(spec: KernelSpec) -> Labelled:
    for scheme in schemes_of(spec):
        yield _words(scheme), weight_given(spec, scheme)


# -- conversions: every pair of dtypes, with numbers that do not fit -----------------------------------
cast = Calls("cast", numbers="special")
cast("result", "float32", numbers="normal", shape=(6, 5), target=torch.float32)
cast("result", "float64", target=torch.float64)

_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e5m2)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _casts(*features: str, sources: tuple[torch.dtype, ...], targets: tuple[torch.dtype, ...]) -> None:
    """A case for each of the pairs, which all need these features; the tensor decides, not the dtype of the case."""
    for source, target in product(sources, targets):
        words = [str(dtype).removeprefix("torch.") for dtype in (source, target)]
        label = "_".join((*words, "saturate") if "saturate" in features else words)
        cast("cast_options", label, *features, source=source, target=target)


_casts(sources=_NARROW, targets=_FLOATS)
_casts(sources=_INTEGERS, targets=(*_INTEGERS, torch.float32, torch.float64))
_casts(sources=(torch.int8, torch.uint8, torch.int16, torch.bool), targets=_FLOATS)
_casts("from_float8", sources=_FLOAT8, targets=(torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2))
_casts("one_rounding", sources=(torch.float64, torch.int64, torch.int32), targets=_FLOATS)
_casts("to_e4m3", sources=(*_NARROW, torch.int16), targets=_FLOAT8[:1])
_casts("to_e4m3", "one_rounding", sources=(torch.float64, torch.int64), targets=_FLOAT8[:1])
_casts("float_to_integer", sources=(torch.float64, *_NARROW), targets=_INTEGERS)
_casts("float_to_integer", "from_float8", sources=_FLOAT8, targets=_INTEGERS)
_casts("saturate", sources=_NARROW, targets=_FLOATS)
_casts("saturate", sources=_INTEGERS, targets=_INTEGERS)
_casts("saturate", "one_rounding", sources=(torch.float64, torch.int64), targets=_FLOATS)
_casts("saturate", "to_e4m3", sources=(*_NARROW, torch.int16), targets=_FLOAT8[:1])
_casts("saturate", "float_to_integer", sources=(torch.float64, *_NARROW), targets=_INTEGERS)


# -- the feed-forward block ----------------------------------------------------------------------------
def first_activation(spec: KernelSpec) -> Given:
    """An activation the kernel declares."""
    words = (word for word in ("silu", *ACTIVATIONS) if f"activation_{word}" in spec.features)
    return {"activation": next(words, "silu")}


mlp = Calls("mlp", first_activation, rank=2, rows=5, hidden=48, inner=64, n=40)
for _kind in ("gated", "split_gate", "ungated"):
    mlp("result", _kind, _kind)
    mlp("result", f"{_kind}_tokens", _kind, rank=3, rows=6)

    @mlp.each("result", _kind)
    def _square(spec: KernelSpec, kind: str = _kind) -> Labelled:
        yield f"{kind}_square", {"n": fit(spec, "hidden", 48)}  # some blocks give back what they take

    mlp("result", f"{_kind}_bias", _kind, "bias")
    for _word in ACTIVATIONS:
        mlp("activation", f"{_kind}_{_word}", _kind, f"activation_{_word}", activation=_word)


# -- sampling: distinct logits, since a tie would let two right kernels differ ---------------------------
# Steep enough (each token 1.9 times as likely as the next) that draws which follow another temperature stand out.
_STEEP: dict[str, Any] = {"batch": 2400, "temperature": 0.2}


def _sampling(op: str, *filters: str, greedy: dict[str, Any], drawn: dict[str, Any]) -> None:
    sample = Calls(op, logits="distinct", batch=6, vocab=97)
    sample("result", "greedy", *filters, temperature=0.0, **greedy)
    by_row = ("tensor_params", "mixed_weight", *filters)
    sample("result", "greedy_by_row", *by_row, temperature=0.0, by_row=True, **greedy)
    sample("sampling", "seeded_by_row", "generator", "tensor_params", *filters, by_row=True, **_STEEP, **drawn)
    sample("sampling", "seeded", "generator", *filters, **_STEEP, **drawn)


_BOTH = ("sample_top_k", "sample_top_p")
_sampling("sample_topk", greedy={"top_k": 5}, drawn={"top_k": 3})
_sampling("sample_topp", greedy={"top_p": 0.7}, drawn={"top_p": 0.8})
_sampling("sample", *_BOTH, greedy={"top_k": 5, "top_p": 0.9}, drawn={"top_k": 4, "top_p": 0.9})
Calls("sample", logits="distinct", vocab=97, top_k=6, top_p=0.95, min_p=0.3, **_STEEP)(
    "sampling", "min_p", "generator", "sample_min_p", *_BOTH
)

probs = Calls("sampling_probs", logits="distinct", batch=5, vocab=61, temperature=0.7)
probs("result", "plain")
probs("result", "greedy", temperature=0.0)
probs("result", "top_k", "sample_top_k", top_k=5)
probs("result", "top_p", "sample_top_p", top_p=0.8)
probs("result", "min_p", "sample_min_p", min_p=0.05)
probs("result", "together", "sample_min_p", *_BOTH, top_k=9, top_p=0.95, min_p=0.01)
probs(
    "result", "by_row", "tensor_params", "mixed_weight", *_BOTH,
    top_k=[1, 3, 61, 9, 40], top_p=[0.5, 0.9, 0.7, 1.0, 0.99], temperature=[0.7, 1.0, 2.0, 0.0, 0.3],
)  # fmt: skip


# -- speculative verification: equal rows, so that their tokens can be counted ---------------------------
def _speculative(op: str, **given: Any) -> None:
    verify = Calls(op, alike=True, batch=6000, vocab=7, **given)
    verify("result", "greedy", "greedy")
    verify("result", "greedy_picked", "greedy", "no_draft_probs", every_dtype=False)
    verify("speculation", "drawn", "generator")
    verify("speculation", "picked", "generator", "no_draft_probs", every_dtype=False)


_speculative("sample_speculative", draft_len=2)
_speculative("sample_tree", draft_len=5, parents=(-1, -1, 0, 0, 1))

# -- routing -------------------------------------------------------------------------------------------
gate = Calls("topk_gate", tokens=20, experts=32, top_k=6, groups=1, routed_scale=1.5)
_GROUPS: dict[str, Any] = {"groups": 8, "groups_kept": 3}
for _word in ("softmax", "sigmoid"):
    _feature = f"scoring_{_word}"
    gate("result", _word, _feature)
    # Few different logits, so that most of the choice is made by id.
    gate("result", f"{_word}_ties", _feature, ties=True)
    gate("result", f"{_word}_bias", _feature, "choice_bias", every_dtype=False)
    gate("result", f"{_word}_groups", _feature, "expert_groups", every_dtype=False, **_GROUPS)
    gate("result", f"{_word}_groups_bias", _feature, "expert_groups", "choice_bias", every_dtype=False, **_GROUPS)

# -- one weight per group of rows ------------------------------------------------------------------------
gemm = Calls("grouped_gemm", n=40, k=64)
gemm("result", "full", tokens=12, group_sizes=(3, 5, 4))
gemm("result", "empty_groups", tokens=7, group_sizes=(0, 5, 0, 2, 0), index_dtype="int32")
gemm("result", "rows_left_over", tokens=9, group_sizes=(2, 0, 3))
gemm("result", "one_group_has_all", tokens=6, group_sizes=(0, 6))


@gemm.each("sizes")
def _widths(spec: KernelSpec) -> Labelled:
    for width in {*edges(spec, "n"), *edges(spec, "k")}:
        yield f"width_{width}", {"tokens": 5, "n": width, "k": width, "group_sizes": (2, 3)}


# -- the experts -----------------------------------------------------------------------------------------
# Small products: a CPU without bfloat16 instructions makes torch warn at larger ones.
def _experts(spec: KernelSpec) -> dict[str, Any]:
    return {**first_activation(spec), **weight_given(spec, hidden=64, inner=32)}


moe = Calls("moe", _experts, tokens=7, experts=6, top_k=3, hidden=40, inner=24)
for _kind in ("gated", "ungated"):
    moe("result", _kind, _kind)
    moe("result", f"{_kind}_one_expert", _kind, tokens=2, ids="one", index_dtype="int32")
    moe("result", f"{_kind}_other_ranks", _kind, ids="foreign", expert_offset=6)
    for _word in ACTIVATIONS:
        moe("activation", f"{_kind}_{_word}", _kind, f"activation_{_word}", activation=_word)
    moe("result", f"{_kind}_bias", _kind, "expert_bias")
moe("result", "clamped", "gated", "clamped")
moe("result", "interleaved", "gated", "interleaved")
moe("result", "gpt_oss", "gated", "activation_swigluoai", "expert_bias", "clamped", "interleaved", ids="foreign")
quantized(moe, "gated", "weight_only", hidden=128, inner=96)
quantized(moe, "gated", "weight_only", "zero_point", suffix="_zero_point", symmetric=False, hidden=128, inner=96)
