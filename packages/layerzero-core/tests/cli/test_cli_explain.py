"""`lz explain`, `lz which`, `lz validate`: calls given by shapes, for devices here and elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from tools.lz_program import run

pytestmark = pytest.mark.usefixtures("clean")


def data(*args: str, code: int = 0) -> Any:
    found = json.loads(run(*args, "--json", code=code).stdout)
    assert found.pop("schema_version") == 1
    return found


def codes(report: Any, kernel_id: str) -> set[str]:
    found = next(item for item in report["candidates"] if item["kernel_id"] == kernel_id)
    return {item["code"] for item in found["reasons"]}


@pytest.mark.req("R-API-17", "R-API-30")
@pytest.mark.parametrize(
    ("words", "tensors", "options"),
    [
        (["--shape", "2,4,16,32"], [(2, 4, 16, 32)] * 3, {}),
        (["--q", "1,8,1,64", "--k", "1,2,40,64"], [(1, 8, 1, 64), (1, 2, 40, 64), (1, 2, 40, 64)], {}),
        (["--shape", "2,4,16,32", "--causal"], [(2, 4, 16, 32)] * 3, {"is_causal": True}),
        (["--shape", "2,16,4,32", "--layout", "BSHD"], [(2, 16, 4, 32)] * 3, {"layout": "BSHD"}),
        (["--shape", "2,4,16,32", "--window", "8,0"], [(2, 4, 16, 32)] * 3, {"window": (8, 0)}),
        (["--shape", "2,4,16,32", "--softcap", "30", "--lse"], [(2, 4, 16, 32)] * 3,
         {"softcap": 30.0, "return_lse": True}),
        (["--shape", "2,4,16,32", "--dropout", "0.5"], [(2, 4, 16, 32)] * 3, {"dropout_p": 0.5}),
    ],
)  # fmt: skip
def test_json_is_what_lz_explain_says_of_the_same_call_on_real_tensors(
    words: list[str], tensors: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    query, key, value = (torch.zeros(shape, dtype=torch.bfloat16) for shape in tensors)
    expected = json.loads(lz.explain("attention", query, key, value, **options).to_json())
    assert data("explain", "attention", *words, "--device", "cpu") == expected


@pytest.mark.req("R-API-16", "R-API-18", "R-API-24", "R-API-30")
def test_which_select_dry_run_and_what_runs_name_one_kernel() -> None:
    x, weight = torch.ones(4, 16), torch.ones(16)
    said = run("which", "rms_norm", "--shape", "4,16", "--dtype", "fp32", "--device", "cpu").stdout.strip()
    assert said == lz.which("rms_norm", x, weight) == lz.select("rms_norm", x, weight).chosen
    assert said == lz.dry_run("rms_norm", x, weight).kernel_id
    lz.rms_norm(x, weight)
    assert lz.explain("rms_norm", x, weight).ran == said
    assert data("which", "rms_norm", "--shape", "4,16", "--dtype", "fp32") == {"op": "rms_norm", "kernel_id": said}


def test_an_h100_gets_torchs_flash_kernel_for_decode_with_grouped_heads() -> None:
    words = ["--q", "1,32,1,128", "--k", "1,8,4096,128", "--causal", "bottom_right", "--device", "h100"]
    report = data("explain", "attention", *words)
    assert report["chosen"] == "sdpa.attention.flash"
    assert report["call"]["device"]["sm_version"] == 90 and report["call"]["dtype"] == "bfloat16"
    assert codes(report, "sdpa.attention.flash_cpu") == {"PLATFORM_MISMATCH"}


@pytest.mark.parametrize(("device", "sm"), [("a100", 80), ("b200", 100), ("sm89", 89), ("RTX 4090", 89)])
def test_other_gpus_are_described_by_their_own_sm(device: str, sm: int) -> None:
    report = data("explain", "attention", "--shape", "1,8,128,128", "--device", device)
    assert report["call"]["device"]["sm_version"] == sm
    assert report["chosen"].startswith("sdpa.attention.") and report["chosen"] != "sdpa.attention.flash_cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 100])
def test_on_a_gpu_that_is_here_torchs_own_checks_are_asked_too(head_dim: int) -> None:
    query = torch.zeros(2, 4, 16, head_dim, dtype=torch.bfloat16, device="cuda")
    expected = json.loads(lz.explain("attention", query, query, query).to_json())
    assert data("explain", "attention", "--shape", f"2,4,16,{head_dim}", "--device", "cuda") == expected


def test_a_turing_card_gets_no_flash_and_the_reason_names_the_limit() -> None:
    report = data("explain", "attention", "--shape", "1,8,128,64", "--dtype", "fp16", "--device", "t4")
    assert codes(report, "sdpa.attention.flash") == {"SM_TOO_OLD"}
    text = run("explain", "attention", "--shape", "1,8,128,64", "--dtype", "fp16", "--device", "t4").stdout
    assert "75" in text and "80" in text


def test_on_the_cpu_cuda_kernels_are_rejected_by_platform() -> None:
    report = data("explain", "attention", "--shape", "1,8,128,64", "--device", "cpu")
    assert report["chosen"].startswith(("sdpa.attention.flash_cpu", "sdpa.attention.math"))
    assert codes(report, "sdpa.attention.flash") == {"PLATFORM_MISMATCH"}


def test_a_gradient_and_a_mask_reach_the_decision() -> None:
    words = ["--shape", "1,8,128,64", "--device", "h100", "--grad", "--mask"]
    report = data("explain", "attention", *words)
    assert {"backward", "mask_bool"} <= set(report["call"]["needs"])
    assert codes(report, "sdpa.attention.flash") == {"MASK_UNSUPPORTED"}


def test_a_huge_call_costs_no_memory() -> None:
    report = data("explain", "attention", "--shape", "64,128,1048576,128", "--device", "b200")
    assert report["call"]["dims"]["seq_len_k"] == 1_048_576


def test_asking_about_a_call_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys; from layerzero_cli.root import cli; cli(['which', 'rms_norm', '--shape', '4,64'], "
        "standalone_mode=False)"
    )
    tail = "sys.exit('torch._dynamo' in sys.modules)"
    words = [sys.executable, "-c", f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\n{tail}"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0 and found.stdout.strip(), found.stderr


_CALLS = {
    "attention": ["--shape", "1,4,16,32"],
    "paged_attention": ["--q", "4,8,64", "--k", "32,16,2,64"],
    "varlen_attention": ["--q", "100,8,64", "--k", "100,2,64", "--context", "40", "--causal"],
    "grouped_attention": ["--q", "64,8,64", "--k", "256,2,64", "--causal"],
    "mla_paged_attention": ["--q", "4,16,512", "--k", "32,16,512", "--lse"],
    "mlp": ["--shape", "4,64", "--weight", "256,64", "--activation", "gelu"],
    "topk_gate": ["--shape", "8,16", "--top-k", "4"],
    "grouped_gemm": ["--shape", "8,64", "--weight", "4,32,64"],
    "moe": ["--shape", "8,64", "--weight", "4,128,64"],
    "rms_norm": ["--shape", "4,64"],
    "add_rms_norm": ["--shape", "2,4,64"],
    "layer_norm": ["--shape", "4,64", "--bias"],
    "gemma_rms_norm": ["--shape", "4,64"],
    "gemma_add_rms_norm": ["--shape", "2,4,64", "--grad"],
    "rope": ["--shape", "1,4,16,32", "--k", "1,2,16,32"],
    "xpos": ["--shape", "1,4,16,32", "--interleaved", "--rotary-dim", "16"],
    "cross_entropy": ["--shape", "2,8,1000", "--softcap", "30", "--lse"],
    "cast": ["--shape", "4,64", "--format", "float16"],
    "silu_and_mul": ["--shape", "4,128"],
    "gelu_and_mul": ["--shape", "4,128", "--approximate", "tanh"],
    "relu_and_mul": ["--shape", "4,128"],
    "linear": ["--shape", "4,64", "--weight", "128,64", "--bias", "--activation", "silu"],
    "embedding": ["--shape", "2,16", "--weight", "1000,64"],
    "sample": ["--shape", "2,1000", "--top-k", "50", "--top-p", "0.9"],
    "sample_topk": ["--shape", "2,1000"],
    "sample_topp": ["--shape", "2,1000"],
    "sampling_probs": ["--shape", "2,1000", "--top-k", "50"],
    "quantize": ["--shape", "4,128", "--format", "fp8_e4m3", "--granularity", "channel"],
    "dequantize": ["--shape", "4,128", "--format", "nvfp4"],
}


def test_every_public_op_can_be_asked_about() -> None:
    texts = {"tokenize", "detokenize"}  # they are asked about with a text and a tokenizer, from Python
    assert {name for name in PUBLIC if PUBLIC[name].shapes} == set(PUBLIC) - texts == set(_CALLS)


@pytest.mark.parametrize("op", sorted(_CALLS))
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_each_op_gets_a_kernel_on_the_cpu_and_on_an_h100(op: str, device: str) -> None:
    report = data("explain", op, *_CALLS[op], "--device", device)
    assert report["chosen"] and report["op"] == op


def test_paged_decode_is_described_from_the_cache() -> None:
    dims = data("explain", "paged_attention", "--q", "4,8,64", "--k", "32,16,2,64", "--device", "h100")["call"]["dims"]
    assert (dims["batch"], dims["page_size"], dims["num_kv_heads"], dims["seq_len_k"]) == (4, 16, 2, 128)
    words = ["--q", "4,8,64", "--k", "32,16,2,64", "--context", "500"]
    assert data("explain", "paged_attention", *words)["call"]["dims"]["seq_len_k"] == 500


@pytest.mark.req("R-API-20")
def test_validate_lists_every_reason_and_leaves_with_one() -> None:
    words = ["--shape", "1,8,128,300", "--dtype", "fp32", "--softcap", "30", "--device", "h100"]
    found = data("validate", "sdpa.attention.flash", *words, code=1)
    assert found["valid"] is False
    assert {"SOFTCAP_UNSUPPORTED", "HEAD_DIM_TOO_LARGE"} <= {item["code"] for item in found["reasons"]}
    text = run("validate", "sdpa.attention.flash", *words, code=1).stdout
    assert "HEAD_DIM_TOO_LARGE" in text and "256" in text
    assert data("validate", "torch.rms_norm.native", "--shape", "4,64") == {
        "kernel_id": "torch.rms_norm.native", "valid": True, "reasons": [],
    }  # fmt: skip


def test_a_backend_may_be_asked_for_alone() -> None:
    report = data("explain", "rms_norm", "--shape", "4,64", "--backend", "reference")
    assert report["chosen"] == "reference.rms_norm.plain"
    assert codes(report, "torch.rms_norm.native") == {"BACKEND_NOT_REQUESTED"}


def test_where_nothing_may_run_the_exit_code_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_LOCK_ATTENTION", "sdpa.attention.flash")
    lz.reset()
    words = ["attention", "--shape", "1,8,128,300", "--device", "cpu"]
    assert data("explain", *words, code=1)["chosen"] == ""
    assert data("which", *words, code=1)["error"]["code"] == "LOCKED_KERNEL_UNAVAILABLE"
    result = run("which", *words, code=1)
    assert result.stdout == "" and "LOCKED_KERNEL_UNAVAILABLE" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "attenton", "--shape", "1,8,16,64"], "attention"),
        (["explain", "attention"], "--q"),
        (["explain", "attention", "--shape", "1,8"], "2 sizes"),
        (["explain", "attention", "--shape", "1,8,a,64"], "is not a shape"),
        (["explain", "attention", "--shape", "1,8,-1,64"], "is not a shape"),
        (["explain", "rms_norm", "--shape", "4,8", "--causal", "--lse"], "--causal, --lse"),
        (["explain", "rms_norm", "--shape", "4,8", "--q", "3"], "rms_norm has no --q"),
        (["explain", "rms_norm", "--shape", "1099511627776,1099511627776"], "that large"),
        (["explain", "attention", "--shape", "1,8,16,64", "--softcap", "nan"], "--softcap nan"),
        (["explain", "rms_norm", "--shape", "4,8", "--dtype", "bf17"], "bf16"),
        (["explain", "rms_norm", "--shape", "4,8", "--device", "h1000"], "h100"),
        (["explain", "rms_norm", "--shape", "4,8", "--device", "cuda:99"], "cuda:99"),
        (["explain", "attention", "--q", "1,6,4,64", "--k", "1,4,4,64"], "GQA_RATIO_INVALID"),
        (["explain", "attention", "--shape", "1,8,16,64", "--causal", "--mask"], "MASK_WITH_CAUSAL"),
        (["explain", "attention", "--shape", "1,8,16,64", "--window", "1,2,3"], "--window"),
        (["validate", "sdpa.attention.flsh", "--shape", "1,8,16,64"], "sdpa.attention.flash"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_message_and_exit_code_two(words: list[str], told: str) -> None:
    result = run(*words, code=2)
    assert told in result.stderr and result.stdout == ""
    assert "Traceback" not in result.output
    answer = json.loads(run(*words, "--json", code=2).stdout)
    assert answer["error"]["code"] and answer["error"]["message"]


def test_where_a_preference_decides_no_score_is_called_lower() -> None:
    asked = ("explain", "rms_norm", "--shape", "4,64", "--dtype", "fp32", "--device", "cpu")
    assert "fits, scored lower" in run(*asked).stdout
    with lz.scoped(prefer=["reference"]):
        text = run(*asked).stdout
    assert "→ reference.rms_norm.plain" in text and "preferred by the policy)" in text
    assert "fits, the policy prefers another" in text and "scored lower" not in text
