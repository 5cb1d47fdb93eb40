"""What benchmarks/vllm_cuda.py and tools/vllm_backends.py make of answers, times and outcomes, and the page of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

from tools.workspace import ROOT


def script(place: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(place.replace("/", "_").removesuffix(".py"), ROOT / place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = script("benchmarks/vllm_cuda.py")
traced = script("benchmarks/vllm_profile.py")


def run_of(
    tokens: list[list[int]], best: list[list[dict[int, float]]], prompts: list[list[float]]
) -> dict[str, object]:
    return {"tokens": tokens, "best": best, "prompts": prompts}


STOCK = run_of(
    [[1, 2], [3, 4], [5, 6]], [[{1: -0.5, 9: -0.75}] * 2, [{3: -1.0, 4: -1.5}] * 2, [{5: -0.1, 6: -3.1}] * 2], [[-1.0]]
)


def test_tokens_that_part_count_with_how_sure_stock_was_and_with_vllms_own_check():
    other = run_of(
        [[9, 2], [3, 4], [5, 7]],
        [[{9: -0.6, 1: -0.61}] * 2, [{3: -1.0, 4: -1.5}] * 2, [{7: -1.0, 8: -2.0}] * 2],
        [[-1.5]],
    )
    found = bench.compared(STOCK, other)
    # the first prompt parts at its first token, where both sides hold the other's; the third where neither does
    assert (found["parted"], found["parted_at_first"], found["beyond_vllms_check"]) == (2, 1, 1)
    assert found["gaps"] == [0.25, 3.0]
    assert found["prompt_logprobs"] == {"tokens": 1, "rms": 0.5, "median": 0.5, "largest": 0.5}
    assert bench.compared(STOCK, STOCK)["parted"] == 0
    assert bench.sureness(STOCK) == 0.5


def answer(backend: str, rms: float, beyond: int = 0) -> dict[str, object]:
    row = {"model": "copying", "dtype": "bfloat16", "backend": backend, "prompts": 24, "sureness": 1.25}
    row["from_float32"] = {"tokens": 100, "rms": rms, "median": rms, "largest": 2 * rms}
    if backend != "FLASH_ATTN":
        row["against_flash_attn"] = {
            "parted": 2,
            "parted_at_first": 1,
            "beyond_vllms_check": beyond,
            "gaps": [0.1, 0.2],
        }
    return row


def test_ours_is_held_against_the_further_of_vllms_backends():
    rows = [answer("FLASH_ATTN", 0.2), answer("TRITON_ATTN", 0.25), answer("CUSTOM", 0.5, beyond=3)]
    assert bench.figures_of("copying", "bfloat16", rows) == {
        "copying, bfloat16: rms from float32 over vLLM's": {"value": 2.0, "at_most": bench.FURTHER},
        "copying, bfloat16: prompts beyond vLLM's check": {"value": 3, "at_most": 0},
    }


class Paced:
    """An engine that takes a given time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        return {"seconds": self.seconds * len(prompts)}


def test_ours_is_timed_over_the_quickest_of_vllms_backends():
    engines = {"FLASH_ATTN": Paced(0.2), "TRITON_ATTN": Paced(0.1), "layerzero": Paced(0.125)}
    rows = {row["case"]: row for row in bench.timed(engines, 100, seconds=0.0)}
    assert list(rows) == list(bench.CASES)
    row = rows["decode B64"]
    assert (row["stock"], row["stock_tokens_s"], row["tokens_s"]) == ("TRITON_ATTN", 640.0, 512.0)
    assert (row["times"], row["low"], row["high"], row["rounds"]) == (0.8, 0.8, 0.8, 4)
    assert row["all"] == {"FLASH_ATTN": 320.0, "TRITON_ATTN": 640.0, "layerzero": 512.0}
    assert row["seconds"] == [[6.4, 8.0]] * 4  # every round is kept
    assert rows["decode B1"]["rounds"] == 12  # short ones run more often
    assert rows["prefill"]["tokens_s"] == 8192.0  # of the prompt


def test_the_interval_of_a_median_is_as_wide_as_the_rounds_are_apart():
    assert bench.interval([1.0] * 20) == (1.0, 1.0)
    low, high = bench.interval([0.9, 1.1] * 10)
    assert low == pytest.approx(0.9) and high == pytest.approx(1.1)


class Warmer(Paced):
    """A second run in a row is slower, whoever makes it."""

    last = 0

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        Warmer.last = (Warmer.last + 1) % 2
        return {"seconds": self.seconds * (1.0 if Warmer.last else 1.1)}


def test_who_ran_second_is_not_seen_in_a_block_of_two_rounds():
    rows = list(bench.timed({"FLASH_ATTN": Warmer(0.1), "layerzero": Warmer(0.1)}, 100, seconds=0.0))
    assert {tuple(pair) for row in rows for pair in row["seconds"]} == {(0.1, 0.11), (0.11, 0.1)}
    assert {(row["times"], row["low"], row["high"]) for row in rows} == {(1.0, 1.0, 1.0)}


def test_a_pair_of_backends_is_one_for_full_layers_and_one_for_those_with_a_window():
    assert bench.attention_of("layerzero") == {"attention_backend": "CUSTOM"}
    assert bench.attention_of("TRITON_ATTN") == {"attention_backend": "TRITON_ATTN"}
    assert bench.attention_of("FLASH_ATTN+TRITON_ATTN") == {
        "attention_config": {"backend": "FLASH_ATTN", "backend_per_kind": {"sliding_window": "TRITON_ATTN"}}
    }


def event(cat: str, name: str, ts: float, dur: float = 1.0, tid: int = 1, **args: int) -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = [
    event("user_annotation", traced.RANGE, 10, 10),
    event("gpu_user_annotation", traced.RANGE, 30, 10),
    event("cuda_runtime", "cudaLaunchKernel", 12, correlation=1),
    event("cuda_runtime", "cudaLaunchKernel", 25, correlation=2),
    event("cuda_driver", "cuLaunchKernelEx", 52, correlation=3),
    event("cuda_runtime", "cudaLaunchKernel", 54, tid=2, correlation=4),
    event("user_annotation", traced.RANGE, 50, 10),
    event("kernel", "gather", 31, tid=7, correlation=1),
    event("kernel", "outside", 33, tid=7, correlation=2),
    event("kernel", "flash", 60, tid=7, correlation=3),
    event("kernel", "of another thread", 61, tid=7, correlation=4),
]


def test_kernels_belong_to_the_layer_in_which_they_were_launched():
    assert traced.inside(TRACE, traced.RANGE) == [["gather"], ["flash"]]
    on_a_cpu = [
        event("cpu_op", traced.THEIR_RANGE, 5, 10),
        event("cpu_op", "_C::attention", 7),
        event("cpu_op", "z", 20),
    ]
    assert traced.inside(on_a_cpu, traced.THEIR_RANGE) == [["_C::attention"]]


def test_a_step_that_ran_other_kernels_than_its_report_says_is_told():
    stock = {"vllm": [["flash"]] * 2, "kernels": {"flash": 2, "triton_poi_0": 1}, "on": "cuda"}
    theirs = {"said": ["vLLM's own"] * 2, "ours": [], "alone": [], **stock, "kernels": {"flash": 2, "triton_poi_1": 1}}
    assert traced.unlike(theirs, stock) == []
    assert traced.unlike({**theirs, "ours": [["gather"]]}, stock) == ["1 calls of ours instead of 0"]
    assert traced.unlike({**theirs, "vllm": [["flash"], []]}, stock)
    assert traced.unlike({**theirs, "kernels": {"flash": 1, "gather": 1}}, stock)
    ours = {"said": ["a", "b"], "ours": [["gather"], ["dense"]], "alone": [["gather"], ["dense"]], **stock}
    assert traced.unlike(ours, stock) == []
    assert traced.unlike({**ours, "ours": [["check", "gather"], ["dense"]]}, stock) == []  # of the batch, once a step
    (said,) = traced.unlike({**ours, "ours": [["gather"], ["check", "dense"]]}, stock)
    assert said == "layer 1 of ours: not the kernels of b alone"
    assert traced.unlike({**ours, "alone": [["dense"], ["dense"]]}, stock)
    assert traced.unlike({**ours, "ours": [["gather"]]}, stock) == ["1 calls of ours instead of 2"]
    mixed = {**ours, "said": ["vLLM's own", "b"], "ours": [["dense"]], "alone": [["dense"]]}
    assert traced.unlike({**mixed, "vllm": [["flash"], ["dense"]]}, stock) == []
    assert traced.unlike({**mixed, "vllm": [["dense"], ["flash"]]}, stock)


def test_in_a_captured_graph_our_kernels_are_counted():
    said = ["triton.paged_attention.split"] * 2
    step = {"said": said, "ours": [], "vllm": [], "alone": [["split", "join"]] * 2, "in_graph": True, "on": "cuda"}
    stock = {"vllm": [], "kernels": {"flash::fwd": 2, "gemm": 8}, "on": "cuda"}
    ran = {"split": 2, "join": 2, "gemm": 8}
    assert traced.unlike({**step, "kernels": ran}, stock) == []
    assert traced.unlike({**step, "kernels": {**ran, "join": 1}}, stock) == ["1 times join instead of 2"]
    assert traced.unlike({**step, "kernels": {**ran, "flash::fwd": 2}}, stock) == ["flash::fwd beside ours"]
    assert traced.unlike({**step, "kernels": stock["kernels"]}, stock)
    assert traced.unlike({**step, "alone": [], "kernels": ran}, stock) == ["nothing ran alone"]


def test_a_profiled_step_of_single_tokens_is_the_next_larger_batch_that_was_timed():
    choices = [
        {"kind": "a", "phase": phase, "kernel": phase}
        for phase in ("decode B1", "long decode B1", "decode B16", "decode B64", "prefill B1x256")
    ]
    assert traced.PROFILED[0] == 4
    assert traced.said_of(choices, "a", "decode") == "decode B16"
    assert traced.said_of(choices[:2], "a", "decode") == "decode B1"
    assert traced.said_of(choices, "a", "prefill") == "prefill B1x256"


HEAD = {"commit": "abc", "command": "python benchmarks/vllm_cuda.py", "versions": {"vllm": "0.26.0", "torch": "2.11.0"}}


def test_the_page_tells_of_answers_rates_and_vllms_own_tests():
    section = script("benchmarks/page_vllm.py").vllm_section
    gpu = {**HEAD, "machine": {"gpu": "a GPU"}}
    said = section("here", {**gpu, "answers": [answer("FLASH_ATTN", 0.2), answer("CUSTOM", 0.25)]})
    assert "| copying bfloat16 | FLASH_ATTN | 0.2000 | 0.400 | 1.25 |  |  |" in said
    assert "| copying bfloat16 | CUSTOM | 0.2500 | 0.500 | 1.25 | 2 of 24 | 0 |" in said

    engines = {"FLASH_ATTN": Paced(0.1), "layerzero": Paced(0.1)}
    model = {
        "model": "llama-1b",
        "dtype": "bfloat16",
        "start_s": 60.04,
        "stock_start_s": 58.0,
        "chosen": [{"winner": "vllm"}],
    }
    model["cases"] = list(bench.timed(engines, 100, seconds=0.0))
    said = section(
        "here", {**gpu, "models": [model], "engine": {"max_num_batched_tokens": 8192}, "geometric_mean": 1.0}
    )
    assert "| decode B1, 1 × 128 + 64 | 640 | 640 (FLASH_ATTN) | 1.000 | 1.000 to 1.000 | 60.0 | 58.0 |" in said

    row = {"model": "llama-1b", "engine": "pinned", "step": "prefill", "layers": 16, "unlike": []}
    row |= {"said": ["sdpa.paged_attention.gather"], "in_attention": {"gather": 16}, "kernels": {}}
    said = section("here", {**gpu, "profiled": [row, {**row, "step": "decode", "unlike": ["1 calls of ours"]}]})
    assert "| llama-1b | pinned | prefill | `sdpa.paged_attention.gather` | 16 of 1 kinds | yes |" in said
    assert (
        "| llama-1b | pinned | decode | `sdpa.paged_attention.gather` | 16 of 1 kinds | no: 1 calls of ours |" in said
    )

    tests = [
        {"test": "a", "outcome": "passed", "ours": {"sdpa.paged_attention.gather": 1}},
        {"test": "b", "outcome": "passed", "ours": {}},
    ]
    found = {
        "device": "a GPU",
        "lists": {"A": ["CUSTOM", "FLASH_ATTN"]},
        "outcomes": {"passed": 2},
        "with_our_kernels": 1,
    }
    said = section("here", {**HEAD, **found, "selected": "not flashinfer", "tests": tests})
    assert "(CUSTOM, FLASH_ATTN): 2 passed; 1 of them ran our kernels (`sdpa.paged_attention.gather`)" in said


def test_a_folder_that_is_no_checkout_of_vllm_is_refused_before_anything_is_imported(tmp_path):
    words = [sys.executable, "-m", "tools.vllm_backends", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no tests/v1/attention/test_attention_backends.py; give a checkout of vLLM 0.26" in done.stderr


def test_a_run_of_vllms_tests_counts_outcomes_and_kernels_by_test(tmp_path):
    kept = script("tools/vllm_backends.py")
    run = kept.Extended(["FLASH_ATTN"], {"commit": "abc"}, tmp_path / "report.json")
    test = tmp_path / "test_two.py"
    test.write_text(
        "import kernels\ndef test_ours():\n    kernels.run['sdpa'] += 1\ndef test_none():\n    assert False\n"
    )
    sys.modules["kernels"] = ModuleType("kernels")
    sys.modules["kernels"].run = run.kernels  # type: ignore[attr-defined]
    run.pytest_collection_modifyitems = lambda items: None  # its lists are vLLM's
    try:
        assert pytest.main([str(test), "-q", "-p", "no:cacheprovider", "-c", "/dev/null"], plugins=[run]) == 1
    finally:
        del sys.modules["kernels"]
    assert [(row["test"], row["outcome"], row["ours"]) for row in run.rows] == [
        ("test_ours", "passed", {"sdpa": 1}),
        ("test_none", "failed", {}),
    ]
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["commit"], told["outcomes"], told["with_our_kernels"]) == ("abc", {"passed": 1, "failed": 1}, 1)
    assert told["figures"] == {"tests that failed": {"value": 1, "at_most": 0}}
    assert "assert False" in told["tests"][1]["why"]
