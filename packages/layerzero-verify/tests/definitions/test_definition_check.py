"""Checking kernels against definitions: what is right passes, and every kind of wrong is found and named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero._ops.signature import public_op
from layerzero.errors import UnknownNameError
from layerzero.model.enums import Layout
from layerzero.numerics import definition_tolerance
from layerzero_verify.definitions import Options, check, draws, open_dataset, read_traces, write_traces
from layerzero_verify.definitions.adapters import ADAPTERS, Adapter, Unsupported, adapter_for
from layerzero_verify.definitions.check import bounds, default_device
from layerzero_verify.definitions.run import check_definition
from layerzero_verify.definitions.schema import load_definition, parse_definition
from layerzero_verify.definitions.sizes import workloads_for
from layerzero_verify.definitions.trace import Report, Status, Workload

OPS = {
    "rmsnorm_h32": "rms_norm",
    "fused_add_rmsnorm_h32": "add_rms_norm",
    "gqa_paged_decode_h4_kv2_d16_ps1": "paged_attention",
    "gqa_paged_prefill_causal_h4_kv2_d16_ps4": "paged_attention",
    "gqa_ragged_prefill_causal_h4_kv2_d16": "varlen_attention",
    "mla_paged_decode_h4_ckv32_kpe8_ps1": "mla_paged_attention",
    "moe_fp16_topk2_e6_h16_i24": "moe",
    "moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h32_i16": "moe",
    "gemm_n24_k64": "linear",
    "gemm_fp8_n24_k64": "linear",
    "top_k_top_p_sampling_from_probs_v48": "sample",
    "rope_with_cos_sin_cache_neox_style_d16_rd8": "rope",
}


def run(root: Path, *, trust: bool = True, sizes: Any = ("small",), **options: Any) -> Report:
    dataset = open_dataset(root)
    given = Options(trust=(str(root),) if trust else (), repeats=1, **options)
    return check(dataset, dataset.select(everything=True), given, sizes=sizes)


def by(report: Report, solution: str) -> list[Any]:
    found = [outcome for outcome in report.outcomes if outcome.solution == solution]
    assert found, f"no outcome of {solution}; there are {sorted({o.solution for o in report.outcomes})}"
    return found


def planted(lab: Any, kernel_id: str, function: Any, **fields: Any) -> str:
    """Register a kernel of this test beside the built-in ones."""
    lab.use(lab.kernel(kernel_id, function, **fields))
    return kernel_id


# -- what is right ------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-05", "R-DEF-07")
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_kind_of_definition_is_checked_on_every_kernel_of_its_op(sets: Any, lab: Any, name: str) -> None:
    assert sorted(OPS) == sorted(sets.samples()), "every sample is tried here"
    root = sets.only(name)
    assert adapter_for(open_dataset(root).definitions[name]).op == OPS[name]
    lab.clear()
    report = run(root, truths=False)
    assert report.ok and not report.problems, [outcome.log for outcome in report.failures]
    passed = {outcome.solution for outcome in report.outcomes if outcome.passed}
    assert f"reference.{OPS[name]}.plain" in passed and "reference" in passed
    usable = {kernel.kernel_id for kernel in lz.list_kernels(OPS[name])}
    told = {outcome.solution for outcome in report.outcomes}
    assert usable <= told, "a kernel that is not tried is named with a reason"
    ran = set(lab.ran())
    for outcome in report.outcomes:
        if outcome.skipped:
            assert outcome.reason is not None and outcome.solution not in ran
        elif outcome.solution in usable:
            assert outcome.solution in ran, "what is reported is what ran, through the real dispatch"
            assert outcome.extra.get("deterministic") is True


@pytest.mark.req("R-DEF-06")
@pytest.mark.parametrize("name", ["rmsnorm_h32", "gemm_n24_k64", "rope_with_cos_sin_cache_neox_style_d16_rd8"])
def test_medium_sizes_pass_too(sets: Any, name: str) -> None:
    report = run(sets.only(name), sizes=("medium",), backends=("reference",))
    assert report.ok and len(by(report, f"reference.{OPS[name]}.plain")) == 3


_LARGE = [name for name in sorted(OPS) if not name.startswith(("gqa_paged_prefill", "gqa_ragged", "top_k"))]


@pytest.mark.slow
@pytest.mark.req("R-DEF-06")
@pytest.mark.parametrize("name", _LARGE)  # the others' plain references take minutes at this size
def test_large_sizes_pass_too(sets: Any, name: str) -> None:
    dataset = open_dataset(sets.only(name))
    work = workloads_for(dataset.definitions[name], ["large"])[:1]
    options = Options(trust=(str(dataset.root),), repeats=1, backends=("reference",))
    found = check_definition(dataset.definitions[name], work, options)
    assert not [outcome.log for outcome in found if outcome.failed]
    assert any(outcome.passed for outcome in found if outcome.solution.endswith(".plain"))


@pytest.mark.req("R-DEF-16")
def test_the_template_asserts_its_constants_inside_run(sets: Any) -> None:
    item = sets.template()
    assert [item["axes"][axis]["value"] for axis in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")] == [
        32, 8, 128, 1,
    ]  # fmt: skip
    report = run(sets.put(sets.root / "right", item), backends=("reference",), truths=False)
    assert report.ok and all(outcome.passed for outcome in by(report, "reference.paged_attention.plain"))
    for axis, value in (("num_qo_heads", 16), ("num_kv_heads", 4), ("head_dim", 64), ("page_size", 2)):
        other = sets.template()
        other["axes"][axis]["value"] = value
        wrong = run(sets.put(sets.root / axis, other), backends=("reference",), truths=False)
        own = by(wrong, "reference")
        assert all(outcome.status is Status.RUNTIME_ERROR and "AssertionError" in outcome.log for outcome in own)


def _spare_slot(item: dict[str, Any]) -> None:
    """As published prefills have it: as many last lengths as offsets, the final one unused."""
    item["inputs"]["kv_last_page_len"]["shape"] = ["len_indptr"]
    del item["axes"]["batch_size"]
    item["constraints"] = [text for text in item["constraints"] if "batch_size" not in text]


def _wider_keys(item: dict[str, Any]) -> None:
    """Latent attention before absorption: keys wider than values."""
    item["op_type"], item["name"] = "mla_ragged", "mla_ragged_prefill_causal"
    item["axes"]["vo_dim"] = {"type": "const", "value": 8}
    for side, name in (("inputs", "v"), ("outputs", "output")):
        item[side][name]["shape"][-1] = "vo_dim"
    item["reference"] = item["reference"].replace("torch.zeros_like(q)", "q.new_zeros(*q.shape[:2], 8)")


def _own_kind(item: dict[str, Any]) -> None:
    """The fused norm as a kind of its own."""
    item["op_type"] = "fused_add_rmsnorm"


def _every_key(item: dict[str, Any]) -> None:
    item["name"] = "gqa_ragged_prefill_noncausal"
    item["reference"] = item["reference"].replace("-math.inf\n    out = torch.einsum", "0\n    out = torch.einsum")
    item["reference"] = item["reference"].replace("keys - queries + row + 1 :", "keys:")


@pytest.mark.req("R-DEF-05")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fused_add_rmsnorm_h32", _own_kind),
        ("gqa_paged_prefill_causal_h4_kv2_d16_ps4", _spare_slot),
        ("gqa_ragged_prefill_causal_h4_kv2_d16", _wider_keys),
        ("gqa_ragged_prefill_causal_h4_kv2_d16", _every_key),
    ],
)
def test_the_forms_that_datasets_use_are_understood(sets: Any, name: str, change: Any) -> None:
    report = run(sets.only(name, change))
    assert not [outcome.log for outcome in report.failures]
    passed = {outcome.solution for outcome in report.outcomes if outcome.passed}
    assert f"reference.{OPS[name]}.plain" in passed and {"reference", "pytorch"} <= passed


# -- what is wrong ------------------------------------------------------------------------------------
def _scaled(factor: float) -> Any:
    return lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) * factor


_count = iter(range(10**9))
_WRONG = {
    "shape": (lambda x, w, eps: _scaled(1.0)(x, w, eps).sum(0), Status.INCORRECT_SHAPE, "shape [32], expected [1, 32]"),
    "dtype": (lambda x, w, eps: _scaled(1.0)(x, w, eps).float(), Status.INCORRECT_DTYPE, "torch.float32"),
    "numbers": (_scaled(1.1), Status.INCORRECT_NUMERICAL, "abs error"),
    "eps": (lambda x, w, eps: _scaled(1.0)(x * 1e-3, w, eps), Status.INCORRECT_NUMERICAL, "abs error"),
    "nan": (lambda x, w, eps: _scaled(math.nan)(x, w, eps), Status.INCORRECT_NUMERICAL, "NaN in different places"),
    "unsteady": (
        lambda x, w, eps: _scaled(1.0)(x, w, eps) * (1 + 0.004 * (next(_count) % 2)),
        Status.INCORRECT_NUMERICAL,
        "two runs on the same inputs differ",
    ),
}


@pytest.mark.req("R-DEF-07", "R-DEF-13")
@pytest.mark.parametrize("kind", sorted(_WRONG))
def test_a_wrong_kernel_fails_in_the_words_of_the_format(sets: Any, lab: Any, kind: str) -> None:
    function, status, words = _WRONG[kind]
    planted(lab, "faulty.rms_norm.x", function)
    report = run(sets.only("rmsnorm_h32"), backends=("faulty", "reference"))
    assert not report.ok
    first = by(report, "faulty.rms_norm.x")[0]
    assert first.status is status and words in first.log
    assert all(outcome.passed for outcome in by(report, "reference.rms_norm.plain")), "the right one still passes"


@pytest.mark.req("R-DEF-08", "R-DEF-13")
def test_a_divergence_comes_with_every_metric_and_the_worst_places(sets: Any, lab: Any) -> None:
    def spoiled(x: Any, weight: Any, eps: float) -> Any:
        out = _scaled(1.0)(x, weight, eps).clone()
        out[-1, 7] += 5.0
        return out

    planted(lab, "faulty.rms_norm.x", spoiled)
    root = sets.only("rmsnorm_h32")
    outcome = by(run(root, backends=("faulty",)), "faulty.rms_norm.x")[-1]
    found = outcome.errors["output"]
    assert found.worst[0].index == (1, 7) and found.worst[0].abs_error == pytest.approx(5.0, rel=0.02)
    metrics = outcome.to_json()["metrics"]["output"]
    assert set(metrics) == {"max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio", "worst"}
    assert metrics["worst"][0]["index"] == [1, 7] and len(metrics["worst"]) <= 5
    assert metrics["hit_ratio"] == pytest.approx(63 / 64) and metrics["mse"] == pytest.approx(25 / 64, rel=0.05)
    assert "[1, 7]" in outcome.log and "cosine" in outcome.log


def test_a_kernel_that_raises_is_a_runtime_error_and_nobody_takes_over(sets: Any, lab: Any) -> None:
    def broken(x: Any, weight: Any, eps: float) -> Any:
        raise RuntimeError("the wrong kind of day")

    planted(lab, "faulty.rms_norm.x", broken)
    report = run(sets.only("rmsnorm_h32"), backends=("faulty",))
    for outcome in by(report, "faulty.rms_norm.x"):
        assert outcome.status is Status.RUNTIME_ERROR and "the wrong kind of day" in outcome.log


def test_a_kernel_whose_code_is_not_there_did_not_compile(sets: Any, lab: Any) -> None:
    from dataclasses import replace

    spec = lab.kernel("faulty.rms_norm.x")
    lab.use(replace(spec, function="no_such_module_of_ours:run"))
    outcome = by(run(sets.only("rmsnorm_h32"), backends=("faulty",)), "faulty.rms_norm.x")[0]
    assert outcome.status is Status.COMPILE_ERROR


def test_a_kernel_that_does_not_take_the_call_is_skipped_with_its_reason(sets: Any, lab: Any) -> None:
    planted(lab, "narrow.rms_norm.x", None, dtypes=frozenset({"float64"}))
    report = run(sets.only("rmsnorm_h32"), backends=("narrow",))
    for outcome in by(report, "narrow.rms_norm.x"):
        assert outcome.skipped and outcome.reason.code == "DTYPE_UNSUPPORTED"
        assert "bfloat16" in outcome.reason.message


def test_a_kernel_that_writes_into_its_inputs_spoils_nobody_else(sets: Any, lab: Any) -> None:
    def greedy(x: Any, weight: Any, eps: float) -> Any:
        out = _scaled(1.0)(x, weight, eps)
        x.zero_()
        weight.zero_()
        return out

    planted(lab, "greedy.rms_norm.x", greedy, priority=999.0)
    report = run(sets.only("rmsnorm_h32"))
    assert report.ok and by(report, "greedy.rms_norm.x")[0].passed
    assert by(report, "reference.rms_norm.plain")[0].passed


def test_a_name_that_means_nothing_is_an_error_and_a_backend_without_the_op_a_reason(sets: Any) -> None:
    root = sets.only("rmsnorm_h32")
    with pytest.raises(UnknownNameError, match="sdpaa"):
        run(root, backends=("sdpaa",))
    outcome = by(run(root, backends=("sdpa",)), "sdpa")[0]
    assert outcome.skipped and "no kernel" in outcome.reason.message


# -- attention, experts, draws: mistakes that look right -----------------------------------------------
def _paged_fault(kind: str) -> Any:
    plain = public_op("paged_attention").fallback_impl
    assert plain is not None

    def run_it(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if kind == "scale":
            given[4] = 1.0
        if kind == "heads":
            given[0] = given[0].flip(1)
        out, lse = plain(*given)
        if kind == "heads":
            out, lse = out.flip(1), lse.flip(1)
        return out, lse / math.log(2) if kind == "base" else lse

    return run_it


@pytest.mark.req("R-DEF-05")
@pytest.mark.parametrize("kind", ["base", "scale", "heads"])
def test_a_wrong_log_base_a_lost_scale_and_mixed_up_heads_are_found(sets: Any, lab: Any, kind: str) -> None:
    pages = {"kv_cache_layouts": frozenset({Layout.NHD}), "index_dtypes": frozenset({"int32"})}
    features = frozenset({"gqa", "lse", "paged_prefill"})
    kernel = planted(lab, "faulty.paged_attention.x", _paged_fault(kind), features=features, **pages)
    report = run(sets.only("gqa_paged_prefill_causal_h4_kv2_d16_ps4"), backends=("faulty", "reference"))
    wrong = by(report, kernel)
    assert any(outcome.status is Status.INCORRECT_NUMERICAL for outcome in wrong), [o.reason or o.log for o in wrong]
    assert all(outcome.passed for outcome in by(report, "reference.paged_attention.plain"))


def test_experts_with_gate_and_up_exchanged_are_found(sets: Any, lab: Any) -> None:
    plain = public_op("moe").fallback_impl
    assert plain is not None

    def swapped(x: Any, gate_up: Any, *rest: Any) -> Any:
        return plain(x, torch.cat(gate_up.chunk(2, 1)[::-1], 1), *rest)

    planted(lab, "faulty.moe.x", swapped, features=frozenset({"gated", "activation_silu"}))
    report = run(sets.only("moe_fp16_topk2_e6_h16_i24"), backends=("faulty",))
    assert any(outcome.failed for outcome in by(report, "faulty.moe.x")), [o.reason for o in report.outcomes]


def _sampler(kind: str) -> Any:
    plain = public_op("sample").fallback_impl
    assert plain is not None

    def draw(logits: Any, top_k: Any, top_p: Any, min_p: Any, temperature: Any, generator: Any) -> Any:
        if kind == "top_p":
            top_p = None
        if kind == "top_k":
            top_k = top_k + 1
        if kind == "flat":
            logits = logits * 0.5
        if kind == "seed":
            generator = None
        out = plain(logits, top_k, top_p, min_p, temperature, generator)
        return out + 1000 if kind == "range" else out

    return draw


def _only_top_k(item: dict[str, Any]) -> None:
    del item["inputs"]["top_p"]
    item["name"] = "top_k_sampling_from_probs_v48"


@pytest.mark.req("R-DEF-05")
@pytest.mark.parametrize("kind", ["top_p", "top_k", "flat", "seed", "range"])
def test_a_sampler_with_the_wrong_distribution_is_found(sets: Any, lab: Any, kind: str) -> None:
    features = frozenset({"tensor_params", "generator", "sample_top_k", "sample_top_p"})
    planted(lab, "faulty.sample.x", _sampler(kind), features=features)
    change = _only_top_k if kind == "top_k" else None
    root = sets.only("top_k_top_p_sampling_from_probs_v48", change)
    report = run(root, trust=False, backends=("faulty", "reference"))  # no code of the dataset is needed to judge draws
    wrong = by(report, "faulty.sample.x")
    assert any(outcome.failed for outcome in wrong), [outcome.reason or outcome.log for outcome in wrong]
    right = by(report, "reference.sample.plain")
    assert all(outcome.passed and outcome.extra["outside"] == 0 for outcome in right)


def test_the_test_of_draws_has_power_in_a_large_vocabulary_and_no_false_alarms() -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.softmax(2 * torch.randn(2, 3000, generator=generator), -1)
    inputs = {"probs": probs, "top_p": torch.tensor([0.9, 0.6])}
    _, right = draws.allowed_and_expected(inputs)

    def sampler(shares: torch.Tensor) -> Any:
        return lambda i, g: torch.multinomial(shares.repeat(i["probs"].shape[0] // 2, 1), 1, generator=g).squeeze(1)

    for seed in range(3):
        assert draws.judge(sampler(right), inputs, seed).ok
    flat = right.sqrt() / right.sqrt().sum(-1, keepdim=True)
    found = draws.judge(sampler(flat), inputs)
    assert found.outside == 0 and found.deviate > draws.MAX_DEVIATE, "the right tokens at the wrong temperature"
    assert draws.judge(sampler(probs.double()), inputs).outside > 0, "top_p forgotten"


# -- the definition itself -----------------------------------------------------------------------------
@pytest.mark.req("R-DEF-13", "R-DEF-07")
@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("return A[:1] @ B.T", Status.INCORRECT_SHAPE, "expected [16, 24]"),
        ("return (A.double() @ B.double().T)", Status.INCORRECT_DTYPE, "torch.float16"),
        ("return A @ B.T, A", Status.RUNTIME_ERROR, "expected 1: C"),
        ("return A @ B", Status.RUNTIME_ERROR, "RuntimeError"),
        ("return A @ B.T + torch.rand(())", Status.INCORRECT_NUMERICAL, "two runs"),
    ],
)
def test_a_reference_that_breaks_its_own_definition_fails(sets: Any, code: str, status: Status, words: str) -> None:
    root = sets.only("gemm_n24_k64", lambda item: item.update(reference=f"def run(A, B):\n    {code}\n"))
    report = run(root, backends=("reference",))
    last = by(report, "reference")[-1]
    assert last.status is status and words in last.log
    kernel = by(report, "reference.linear.plain")[-1]
    assert kernel.passed and kernel.against == "pytorch", "kernels are then held against the ground truth"


@pytest.mark.req("R-DEF-13")
def test_a_reference_that_differs_from_the_ground_truth_fails_with_the_difference(sets: Any) -> None:
    root = sets.only("gemm_n24_k64", lambda item: item.update(reference="def run(A, B):\n    return A @ B.T * 1.01\n"))
    outcome = by(run(root, backends=("reference",)), "pytorch")[-1]
    assert outcome.status is Status.INCORRECT_NUMERICAL and outcome.against == "reference"
    assert outcome.errors["C"].worst and "off by" in outcome.log


def test_a_reference_that_does_not_compile_is_a_compile_error(sets: Any) -> None:
    root = sets.only("gemm_n24_k64", lambda item: item.update(reference="import nothing_like_it\ndef run(A, B): ..."))
    outcome = by(run(root), "reference")[0]
    assert outcome.status is Status.COMPILE_ERROR and "nothing_like_it" in outcome.log


@pytest.mark.req("R-DEF-13")
def test_what_nobody_computes_is_skipped_with_the_reason(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = sets.only("gemm_n24_k64", lambda item: item.update(op_type="gdn", name="gdn_decode"))
    report = run(strange)
    assert by(report, "layerzero")[0].reason.code == "OP_UNKNOWN"
    assert all(outcome.passed for outcome in by(report, "reference")), "its own code is still looked at"
    monkeypatch.setitem(ADAPTERS, "gemm", lambda definition: Adapter("op_of_the_future", lambda op, i: op(**i)))
    absent = by(run(sets.only("gemm_n24_k64")), "layerzero")[0]
    assert absent.skipped and "op_of_the_future" in absent.reason.message


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemm_n24_k64", lambda i: i["inputs"].pop("B"), "no input B"),
        ("gemm_n24_k64", lambda i: i["inputs"].update(bias={"shape": ["N"], "dtype": "float16"}), "bias"),
        ("gqa_paged_decode_h4_kv2_d16_ps1", lambda i: i["inputs"].update(sinks=i["inputs"]["q"]), "sinks"),
        ("gqa_paged_decode_h4_kv2_d16_ps1", lambda i: i.update(name="gqa_paged_noncausal"), "causal"),
        ("rmsnorm_h32", lambda i: i["inputs"].pop("hidden_states"), "hidden_states"),
        ("moe_fp16_topk2_e6_h16_i24", lambda i: i["inputs"].pop("topk_ids"), "routing"),
    ],
)  # fmt: skip
def test_an_input_whose_meaning_is_not_known_is_never_left_out_silently(
    sets: Any, name: str, change: Any, words: str
) -> None:
    item = sets.samples()[name]
    change(item)
    with pytest.raises(Unsupported, match=words):
        adapter_for(parse_definition(item))


def test_a_norm_without_an_eps_anywhere_is_skipped(sets: Any) -> None:
    code = "def run(hidden_states, weight):\n    return hidden_states\n"
    report = run(sets.only("rmsnorm_h32", lambda item: item.update(reference=code)), backends=("reference",))
    outcome = by(report, "reference.rms_norm.plain")[0]
    assert outcome.failed or (outcome.skipped and "eps" in str(outcome.reason))


def test_a_workload_that_cannot_be_made_is_skipped_and_the_next_one_runs(sets: Any) -> None:
    dataset = open_dataset(sets.only("gemm_n24_k64"))
    work = [Workload("bad", {"M": 2, "K": 5}), Workload("good", {"M": 2})]
    found = check_definition(dataset.definitions["gemm_n24_k64"], work, Options(backends=("reference",), repeats=1))
    bad = [outcome for outcome in found if outcome.workload.uuid == "bad" and outcome.solution == "inputs"]
    assert bad[0].skipped and bad[0].reason.code == "SHAPE_INVALID"
    assert any(outcome.passed for outcome in found if outcome.workload.uuid == "good")


# -- bounds --------------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-10", "R-DEF-09")
def test_the_bounds_are_the_table_of_definitions(sets: Any) -> None:
    made = {name: parse_definition(item) for name, item in sets.samples().items()}
    assert bounds(made["rmsnorm_h32"], "output") == definition_tolerance("bfloat16")
    assert bounds(made["gemm_n24_k64"], "C") == definition_tolerance("float16")
    assert bounds(made["gqa_ragged_prefill_causal_h4_kv2_d16"], "output") == definition_tolerance("float32")
    assert bounds(made["top_k_top_p_sampling_from_probs_v48"], "samples").exact
    for name, output in (
        ("gemm_fp8_n24_k64", "C"),
        ("moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h32_i16", "output"),
    ):
        low = bounds(made[name], output)
        assert (low.rtol, low.atol, low.hit_ratio) == (2e-1, 1e-1, 0.85)
    assert bounds(made["gqa_paged_decode_h4_kv2_d16_ps1"], "lse").atol == 1e-5
    item = sets.samples()["gemm_n24_k64"]
    for spec in (*item["inputs"].values(), *item["outputs"].values()):
        spec["dtype"] = "float32"
    assert bounds(parse_definition(item), "C").atol == pytest.approx(1e-5), "64 terms: the table is wider"
    item["axes"]["K"]["value"] = 40_000
    assert bounds(parse_definition(item), "C").atol == pytest.approx(200e-6), "a sum of 40 000 terms: sqrt of it"
    item["inputs"]["A"]["dtype"] = "float4_e2m1"
    assert bounds(parse_definition(item), "C").hit_ratio == 0.85


@pytest.mark.req("R-DEF-09")
@pytest.mark.parametrize(("share", "good"), [(0.10, True), (0.20, False)])
def test_low_bit_numbers_need_85_percent_hits(sets: Any, lab: Any, share: float, good: bool) -> None:
    def partly(x: Any, weight: Any, bias: Any, activation: Any) -> Any:
        out = torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype).flatten()
        out[: math.ceil(share * out.numel())] += 30.0
        return out.reshape(x.shape[0], -1)

    planted(lab, "faulty.linear.x", partly)
    low = by(run(sets.only("gemm_fp8_n24_k64"), backends=("faulty",)), "faulty.linear.x")[-1]
    assert low.passed is good, low.log
    full = by(run(sets.only("gemm_n24_k64"), backends=("faulty",)), "faulty.linear.x")[-1]
    assert full.failed, "whole numbers of bits allow no misses"


def test_bounds_given_by_the_caller_replace_the_tables_numbers(sets: Any, lab: Any) -> None:
    root = sets.only("rmsnorm_h32")
    planted(lab, "faulty.rms_norm.x", _scaled(1.1))
    assert not run(root, backends=("faulty",)).ok and run(root, backends=("faulty",), rtol=0.2, atol=0.0).ok
    planted(lab, "faulty.rms_norm.x", _scaled(1.004))
    assert run(root, backends=("faulty",)).ok and not run(root, backends=("faulty",), rtol=0.0, atol=0.0).ok


@pytest.mark.req("R-DEF-14")
def test_the_gpu_is_the_default_and_the_cpu_where_there_is_none(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device() == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")
    report = run(sets.only("gemm_n24_k64"), backends=("reference",))
    assert report.device == "cpu" and report.ok


@pytest.mark.gpu
@pytest.mark.req("R-DEF-14")
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_kind_of_definition_passes_on_the_gpu(sets: Any, name: str) -> None:
    report = run(sets.only(name), sizes=("small", "runner"))
    assert report.device == "cuda" and not [outcome.log for outcome in report.failures]
    assert by(report, f"reference.{OPS[name]}.plain")[0].passed


# -- counting and writing -------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-12")
def test_passes_are_counted_by_source(sets: Any, lab: Any) -> None:
    planted(lab, "faulty.rms_norm.x", _scaled(1.5))
    report = run(sets.only("rmsnorm_h32"), backends=("faulty", "reference"))
    counts = report.counts()
    wrong, right = (counts[f"{name} against reference"] for name in ("faulty.rms_norm.x", "reference.rms_norm.plain"))
    assert (wrong.passed, wrong.failed) == (0, 2) and (right.passed, right.failed) == (2, 0)
    assert str(right) == "2/2 passed" and counts["flashinfer"].skipped == 1
    told = report.to_json()["counts"]
    assert told["faulty.rms_norm.x against reference"] == {"passed": 0, "failed": 2, "skipped": 0}
    assert told.keys() == counts.keys() and told["flashinfer"]["skipped"] == 1


def test_traces_say_what_happened_and_skips_leave_none(sets: Any, lab: Any, tmp_path: Path) -> None:
    planted(lab, "faulty.rms_norm.x", _WRONG["numbers"][0])
    report = run(sets.only("rmsnorm_h32"), backends=("faulty", "reference"))
    out = tmp_path / "traces.jsonl"
    assert write_traces(report, out) == sum(not outcome.skipped for outcome in report.outcomes)
    found, bad = read_traces(out)
    assert not bad
    states = {trace.solution: trace.evaluation.status for trace in found}
    assert states["faulty.rms_norm.x"] is Status.INCORRECT_NUMERICAL
    assert states["reference.rms_norm.plain"] is Status.PASSED and "flashinfer" not in states
    good = next(trace.evaluation for trace in found if trace.solution == "reference.rms_norm.plain")
    assert good.latency_ms > 0 and good.reference_latency_ms > 0 and good.extra["compared_with"] == "reference"
    assert good.libs["torch"] == torch.__version__ and good.hardware


def test_the_inputs_of_a_trace_can_be_made_again(sets: Any, tmp_path: Path) -> None:
    from layerzero_verify.definitions.inputs import make_inputs

    root = sets.only("rmsnorm_h32")
    write_traces(run(root, backends=("reference",)), tmp_path / "traces.jsonl")
    definition = load_definition(root / "definitions" / "rmsnorm" / "rmsnorm_h32.json")
    for trace in read_traces(tmp_path / "traces.jsonl")[0]:
        again, before = (make_inputs(definition, trace.workload, "cpu") for _ in range(2))
        assert torch.equal(again["hidden_states"], before["hidden_states"])


@pytest.mark.req("R-DEF-01")
def test_what_is_tested_already_is_left_out_unless_forced(sets: Any) -> None:
    root = sets.put(sets.root, sets.samples()["rmsnorm_h32"], sets.samples()["gemm_n24_k64"])
    tests = root / "tests" / "references"
    tests.mkdir(parents=True)
    (tests / "test_norm.py").write_text("# rmsnorm_h32\n", encoding="utf-8")
    dataset = open_dataset(root)
    options = Options(backends=("reference",), repeats=1)
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    assert set(report.left_out) == {"rmsnorm_h32"} and "test_norm.py" in report.left_out["rmsnorm_h32"]
    assert {outcome.definition for outcome in report.outcomes} == {"gemm_n24_k64"}
    forced = check(dataset, dataset.select(everything=True), options, sizes=["small"], force=True)
    assert {outcome.definition for outcome in forced.outcomes} == {"gemm_n24_k64", "rmsnorm_h32"}


@pytest.mark.req("R-DEF-15")
def test_the_workloads_of_the_dataset_are_checked_too(sets: Any) -> None:
    root = sets.only("gemm_n24_k64")
    file = root / "workloads" / "gemm" / "gemm_n24_k64.jsonl"
    file.parent.mkdir(parents=True)
    line = '{"definition": "gemm_n24_k64", "workload": {"uuid": "mine", "axes": {"M": 7}, "inputs": {}}}'
    file.write_text(f"{line}\nnot json\n", encoding="utf-8")
    dataset = open_dataset(root)
    options = Options(backends=("reference",), repeats=1)
    report = check(dataset, dataset.select(everything=True), options, sizes=())
    assert {outcome.workload.uuid for outcome in report.outcomes} == {"mine"}
    assert len(report.problems) == 1 and not report.ok, "a line that cannot be read is a problem"
    without = check(dataset, dataset.select(everything=True), options, sizes=("small",), stored=False)
    assert "mine" not in {outcome.workload.uuid for outcome in without.outcomes} and without.ok


@pytest.mark.req("R-DEF-13")
def test_a_bad_file_is_a_problem_of_those_who_ask_for_its_kind(sets: Any) -> None:
    root = sets.put(sets.root, sets.samples()["rmsnorm_h32"], sets.samples()["gemm_n24_k64"])
    (root / "definitions" / "gemm" / "bad.json").write_text("{", encoding="utf-8")
    dataset, options = open_dataset(root), Options(backends=("reference",), repeats=1)
    norm = check(dataset, dataset.select(["rmsnorm_h32"]), options, sizes=["small"])
    assert norm.ok and not norm.problems
    gemm = check(dataset, dataset.select(op_types=["gemm"]), options, sizes=["small"])
    assert not gemm.ok and "bad.json" in gemm.problems[0] and not gemm.failures
