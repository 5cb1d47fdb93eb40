"""Ground truths: FlashInfer first, SGLang beside it, PyTorch when neither is there, and a reason for each that is not.

The vendors' libraries need a GPU, so stand-ins with the same calls, written on plain PyTorch, take their place here.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from layerzero_verify.definitions import Options, check, open_dataset
from layerzero_verify.definitions import truths as truths_module
from layerzero_verify.definitions.inputs import make_inputs
from layerzero_verify.definitions.schema import parse_definition
from layerzero_verify.definitions.sizes import workloads_for
from layerzero_verify.definitions.trace import Status
from layerzero_verify.definitions.truths import find_truths

CPU = torch.device("cpu")


# -- the stand-ins ---------------------------------------------------------------------------------------
def rmsnorm(input: Any, weight: Any, eps: float = 1e-6) -> Any:
    return torch.nn.functional.rms_norm(input.float(), input.shape[-1:], weight.float(), eps).to(input.dtype)


def fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float = 1e-6) -> None:
    residual.add_(input)
    input.copy_(rmsnorm(residual, weight, eps))


def apply_rope(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True) -> None:
    assert is_neox and query.ndim == 2
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    half = cos.shape[-1]
    for flat in (query, key):
        heads = flat.view(flat.shape[0], -1, head_size)
        one, two = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., :half] = (one * cos[:, None] - two * sin[:, None]).to(heads.dtype)
        heads[..., half : 2 * half] = (two * cos[:, None] + one * sin[:, None]).to(heads.dtype)


def top_k_top_p(probs: Any, top_k: Any, top_p: Any) -> Any:
    ordered, ids = probs.sort(-1, descending=True)
    ordered = ordered * (torch.arange(probs.shape[-1]) < top_k[:, None])
    ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered * ((ordered.cumsum(-1) - ordered) < top_p[:, None])
    return ids.gather(1, torch.multinomial(ordered, 1)).squeeze(1).to(torch.int32)


def attend(q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
    """One sequence with a mask by index; the log-sum-exp in base 2, as FlashInfer gives it."""
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float() * scale, k)
    late = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    scores = scores.masked_fill(late[:, None], -math.inf)
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out, torch.log2(scores.double().exp().sum(-1)).float()


class Paged:
    """Both paged wrappers: planned with offsets and pages, then run."""

    def __init__(self, workspace: Any, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert workspace.dtype is torch.uint8 and workspace.numel() >= 2**20 and kv_layout == "NHD"

    def plan(self, *args: Any, sm_scale: float, q_data_type: Any, kv_data_type: Any, causal: bool = False) -> None:
        *queries, self.indptr, self.indices, self.last, self.heads, self.kv_heads, self.dim, self.page = args
        self.queries = queries[0] if queries else torch.arange(len(self.indptr))
        assert causal is bool(queries) and q_data_type == kv_data_type
        self.scale = sm_scale

    def run(self, q: Any, paged_kv_cache: Any, return_lse: bool = False) -> Any:
        assert q.shape[1:] == (self.heads, self.dim) and return_lse
        outs = []
        for b in range(len(self.indptr) - 1):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            length = (len(pages) - 1) * self.page + int(self.last[b])
            k, v = (cache[pages].reshape(-1, self.kv_heads, self.dim)[:length] for cache in paged_kv_cache)
            outs.append(attend(q[self.queries[b] : self.queries[b + 1]], k, v, self.scale))
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))


class Ragged:
    def __init__(self, workspace: Any, kv_layout: str = "NHD") -> None:
        assert workspace.dtype is torch.uint8

    def plan(self, q_ptr: Any, kv_ptr: Any, heads: int, kv_heads: int, dim: int, dim_v: int, **more: Any) -> None:
        assert dim == dim_v and more["causal"] is True and more["q_data_type"] == more["kv_data_type"]
        self.offsets, self.scale = (q_ptr.tolist(), kv_ptr.tolist()), more["sm_scale"]

    def run(self, q: Any, k: Any, v: Any, return_lse: bool = False) -> Any:
        one, two = self.offsets
        parts = [
            attend(q[one[b] : one[b + 1]], k[two[b] : two[b + 1]], v[two[b] : two[b + 1]], self.scale)
            for b in range(len(one) - 1)
        ]
        return tuple(torch.cat(items) for items in zip(*parts, strict=True))


class Latent:
    def __init__(self, workspace: Any) -> None:
        pass

    def plan(self, q_ptr: Any, kv_ptr: Any, kv_indices: Any, kv_len: Any, heads: int, ckv: int, kpe: int, page: int,
             causal: bool, sm_scale: float, q_dtype: Any, kv_dtype: Any) -> None:  # fmt: skip
        assert (heads, ckv, kpe, page, causal) == (4, 32, 8, 1, False) and kv_len.dtype is torch.int32
        self.given = (kv_ptr, kv_indices, kv_len, sm_scale)

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, return_lse: bool = False) -> Any:
        kv_ptr, indices, lengths, scale = self.given
        outs = []
        for b in range(len(kv_ptr) - 1):
            rows = indices[kv_ptr[b] : kv_ptr[b + 1]].long()[: int(lengths[b])]
            keys = torch.cat((ckv_cache[rows, 0], kpe_cache[rows, 0]), -1)[:, None]
            query = torch.cat((q_nope[b], q_pe[b]), -1)[None]
            out, lse = attend(query, keys, keys, scale)
            outs.append((out[..., : q_nope.shape[-1]], lse))
        return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))


def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    assert config.activation == "silu"
    weights, ids, _ = topk_output
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (layer.w13_weight[expert].float() @ x[token].float()).chunk(2)
            out[token] += weight * (layer.w2_weight[expert].float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(x.dtype)


def modules() -> dict[str, dict[str, Any]]:
    norms = {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm}
    rope = {"apply_rope_with_cos_sin_cache_inplace": apply_rope}
    wrappers = {f"Batch{kind}WithPagedKVCacheWrapper": Paged for kind in ("Decode", "Prefill")}
    return {
        "flashinfer": {**wrappers, "BatchPrefillWithRaggedKVCacheWrapper": Ragged},
        "flashinfer.norm": norms,
        "flashinfer.rope": rope,
        "flashinfer.sampling": {"top_k_top_p_sampling_from_probs": top_k_top_p},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Latent},
        "sgl_kernel": {**norms, **rope, "top_k_top_p_sampling_from_probs": top_k_top_p},
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.layers": {},
        "sglang.srt.layers.moe": {},
        "sglang.srt.layers.moe.fused_moe_native": {"moe_forward_native": moe_forward_native},
        "sglang.srt.layers.moe.moe_runner": {
            "MoeRunnerConfig": lambda activation: SimpleNamespace(activation=activation)
        },
    }


class Vendors:
    """Installs stand-ins, whole libraries at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = monkeypatch, folder
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(truths_module, "_NEEDS_GPU", frozenset())

    def install(self, library: str, **changes: Any) -> None:
        (self.folder / library).mkdir(exist_ok=True)
        (self.folder / library / "__init__.py").touch()
        for name, content in modules().items():
            if name.split(".")[0] == library:
                made = ModuleType(name)
                made.__path__ = []
                made.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
                vars(made).update({**content, **{key: item for key, item in changes.items() if key in content}})
                self.patch.setitem(sys.modules, name, made)


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Vendors:
    folder = tmp_path / "vendors"
    folder.mkdir()
    # The stand-ins compute any width; the definitions here are small.
    monkeypatch.setattr(truths_module, "_expect_width", lambda width, known: None)
    monkeypatch.setattr(truths_module, "_expect_rotary", lambda width: None)
    return Vendors(monkeypatch, folder)


@pytest.mark.parametrize("width", [16, 96, 512])
def test_flashinfers_attention_is_not_asked_for_widths_it_was_not_written_for(width: int) -> None:
    """On an H200 it compiled for head_dim 16 and then read out of bounds, which no process survives."""
    with pytest.raises(NotImplementedError, match=str(width)):
        truths_module._expect_width(width, truths_module._WIDTHS)
    truths_module._expect_width(128, truths_module._WIDTHS)


@pytest.mark.req("R-DEF-04")
def test_flashinfers_rope_is_not_asked_for_pairs_it_would_read_between_two_words(sets: Any) -> None:
    """On an H200 rotary_dim 8 ended in a misaligned address, which no process survives either."""
    definition = parse_definition(sets.samples()["rope_with_cos_sin_cache_neox_style_d16_rd8"])
    inputs = make_inputs(definition, workloads_for(definition, ["small"])[-1], "cpu")
    with pytest.raises(NotImplementedError, match="rotary_dim 8"):
        truths_module.FLASHINFER["rope"](definition, inputs)
    truths_module._expect_rotary(64)


def sources(definition: Any) -> list[str]:
    return [truth.source for truth in find_truths(definition, CPU)[0]]


# -- the order -------------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-04")
def test_flashinfer_comes_first_then_sglang_then_pytorch(sets: Any, vendors: Vendors) -> None:
    made = {name: parse_definition(item) for name, item in sets.samples().items()}
    norm, gemm, moe = made["rmsnorm_h32"], made["gemm_n24_k64"], made["moe_fp16_topk2_e6_h16_i24"]
    assert sources(norm) == sources(gemm) == ["pytorch"] and sources(moe) == []
    vendors.install("sgl_kernel")
    assert sources(norm) == ["sglang"], "PyTorch is the last resort"
    vendors.install("flashinfer")
    assert sources(norm) == ["flashinfer", "sglang"]
    assert sources(gemm) == ["pytorch"], "for products PyTorch is the truth, whatever is installed"
    vendors.install("sglang")
    assert sources(moe) == ["sglang"], "experts come from SGLang"


@pytest.mark.req("R-DEF-04", "R-DEF-13")
def test_every_truth_that_is_not_used_has_its_reason(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: parse_definition(item) for name, item in sets.samples().items()}
    missing = find_truths(made["rmsnorm_h32"], CPU)[1]
    assert {name: why.code for name, why in missing.items()} == {
        "flashinfer": "BACKEND_NOT_INSTALLED", "sglang": "BACKEND_NOT_INSTALLED",
    }  # fmt: skip
    assert "flashinfer-python" in missing["flashinfer"].hint
    rope = find_truths(made["rope_with_cos_sin_cache_neox_style_d16_rd8"], CPU)
    assert rope[0] == [] and rope[1]["pytorch"].code == "FEATURE_UNSUPPORTED"
    assert find_truths(made["gemm_n24_k64"], CPU)[1]["flashinfer"].code == "FEATURE_UNSUPPORTED"


def test_an_installed_library_without_its_gpu_or_with_a_broken_import_says_so(
    sets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    (tmp_path / "site" / "flashinfer" / "__init__.py").write_text("raise OSError('libcuda is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    norm = parse_definition(sets.samples()["rmsnorm_h32"])
    assert find_truths(norm, CPU)[1]["flashinfer"].code == "PLATFORM_MISMATCH"
    monkeypatch.setattr(truths_module, "_NEEDS_GPU", frozenset())
    found, missing = find_truths(norm, CPU)
    assert missing["flashinfer"].code == "BACKEND_IMPORT_FAILED" and "libcuda" in missing["flashinfer"].message
    assert [truth.source for truth in found] == ["pytorch"]


# -- what they compute -------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-05")
@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("gqa_paged_decode_h4_kv2_d16_ps1", "BatchDecodeWithPagedKVCacheWrapper"),
        ("gqa_paged_prefill_causal_h4_kv2_d16_ps4", "BatchPrefillWithPagedKVCacheWrapper"),
        ("gqa_ragged_prefill_causal_h4_kv2_d16", "BatchPrefillWithRaggedKVCacheWrapper"),
        ("mla_paged_decode_h4_ckv32_kpe8_ps1", "BatchMLAPagedAttentionWrapper"),
    ],
)
def test_each_kind_of_attention_is_planned_by_the_wrapper_made_for_it(
    sets: Any, vendors: Vendors, name: str, wrapper: str
) -> None:
    used: list[str] = []

    def noting(kind: str, made: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            used.append(kind)
            return made(*args, **kwargs)

        return make

    known = {kind: made for library in modules().values() for kind, made in library.items() if "Wrapper" in kind}
    assert wrapper in known and len(known) == 4
    vendors.install("flashinfer", **{kind: noting(kind, made) for kind, made in known.items()})
    definition = parse_definition(sets.samples()[name])
    (truth,) = find_truths(definition, CPU)[0]
    truth.run(make_inputs(definition, workloads_for(definition, ["small"])[-1], "cpu"))
    assert used == [wrapper]


@pytest.mark.req("R-DEF-04", "R-DEF-05", "R-DEF-12")
def test_references_agree_with_the_libraries_and_the_libraries_with_each_other(sets: Any, vendors: Vendors) -> None:
    for library in ("flashinfer", "sgl_kernel", "sglang"):
        vendors.install(library)
    root = sets.put(sets.root / "all", *sets.samples().values())
    dataset = open_dataset(root)
    options = Options(trust=(str(root),), repeats=1, backends=("sdpa",))
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    assert not report.failures, [(o.definition, o.solution, o.against, o.log) for o in report.failures]
    tried = {(o.definition, o.solution, o.against) for o in report.outcomes if o.passed}
    for name in ("rmsnorm_h32", "fused_add_rmsnorm_h32", "rope_with_cos_sin_cache_neox_style_d16_rd8"):
        assert {
            (name, "flashinfer", "reference"),
            (name, "sglang", "reference"),
            (name, "sglang", "flashinfer"),
        } <= tried
    for name in dataset.definitions:
        if name.startswith(("gqa", "mla")):
            assert (name, "flashinfer", "reference") in tried
    assert ("moe_fp16_topk2_e6_h16_i24", "sglang", "reference") in tried
    assert ("gemm_n24_k64", "pytorch", "reference") in tried
    draws = "top_k_top_p_sampling_from_probs_v48"
    assert {(draws, "flashinfer", "distribution"), (draws, "sglang", "distribution")} <= tried
    counts = report.counts()
    assert counts["sglang against flashinfer"].passed == 6 and counts["sglang against flashinfer"].failed == 0


@pytest.mark.req("R-DEF-12")
def test_libraries_that_disagree_are_told_apart(sets: Any, vendors: Vendors) -> None:
    vendors.install("flashinfer")
    vendors.install("sgl_kernel", rmsnorm=lambda x, w, eps: rmsnorm(x, w, eps) * 1.05)
    root = sets.only("rmsnorm_h32")
    dataset = open_dataset(root)
    options = Options(trust=(str(root),), repeats=1, backends=("reference",))
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    states = {(o.solution, o.against): o.status for o in report.outcomes if not o.skipped}
    assert states["flashinfer", "reference"] is Status.PASSED
    assert states["sglang", "reference"] is Status.INCORRECT_NUMERICAL
    assert states["sglang", "flashinfer"] is Status.INCORRECT_NUMERICAL
    assert states["reference.rms_norm.plain", "reference"] is Status.PASSED
    counts = report.counts()
    assert counts["flashinfer against reference"].passed == 2 and counts["sglang against reference"].failed == 2


def test_without_trust_kernels_are_held_against_the_first_truth(sets: Any, vendors: Vendors) -> None:
    vendors.install("flashinfer")
    dataset = open_dataset(sets.only("gqa_paged_decode_h4_kv2_d16_ps1"))
    options = Options(repeats=1, backends=("reference",))
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    kernels = [o for o in report.outcomes if o.solution == "reference.paged_attention.plain"]
    assert kernels and all(
        o.passed and o.against == "flashinfer" and set(o.errors) == {"output", "lse"} for o in kernels
    )


def test_pytorchs_attention_gives_no_lse_and_the_log_says_so(sets: Any) -> None:
    dataset = open_dataset(sets.only("gqa_paged_decode_h4_kv2_d16_ps1"))
    report = check(
        dataset, dataset.select(everything=True), Options(repeats=1, backends=("reference",)), sizes=["small"]
    )
    kernel = next(o for o in report.outcomes if o.solution == "reference.paged_attention.plain")
    assert kernel.passed and set(kernel.errors) == {"output"} and "lse: not compared" in kernel.log


def test_a_form_a_library_does_not_have_is_a_skip_with_the_reason(sets: Any, vendors: Vendors) -> None:
    vendors.install("sglang")
    name = "moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h32_i16"
    dataset = open_dataset(sets.only(name))
    options = Options(trust=(str(dataset.root),), repeats=1, backends=("reference",))
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    outcome = next(o for o in report.outcomes if o.solution == "sglang")
    assert outcome.skipped and "without scales" in outcome.reason.message


def test_truths_leave_their_inputs_alone(sets: Any, vendors: Vendors) -> None:
    vendors.install("flashinfer")
    for name in ("fused_add_rmsnorm_h32", "rope_with_cos_sin_cache_neox_style_d16_rd8"):
        definition = parse_definition(sets.samples()[name])
        inputs = make_inputs(definition, workloads_for(definition, ["small"])[-1], "cpu")
        before = {key: value.clone() for key, value in inputs.items()}
        find_truths(definition, CPU)[0][0].run(inputs)
        assert all(torch.equal(before[key], inputs[key]) for key in inputs)
