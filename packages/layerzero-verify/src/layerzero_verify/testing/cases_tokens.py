"""Cases of sampling, speculative verification, routing and the experts."""

from __future__ import annotations

from typing import Any

from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Calls, Labelled, edges
from layerzero_verify.testing.cases_rows import ACTIVATIONS, first_activation, quantized, weight_given

__all__: list[str] = []

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
