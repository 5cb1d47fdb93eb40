"""What the page of benchmarks says of a kept run: rates, start-up, tokens that part, how many choices are ours."""

from __future__ import annotations

import importlib.util

from tools.workspace import ROOT

CASE = {"case": "decode B1", "prompts": 1, "prompt_tokens": 32, "new_tokens": 48}
MODEL = {
    "model": "llama",
    "dtype": "float32",
    "start_s": 8.04,
    "stock_start_s": 7.5,
    "prompts": 200,
    "parted": 3,
    "parted_beyond": 0,
    "cases": [{**CASE, "stock_tokens_s": 40.0, "tokens_s": 50.0, "times": 1.25}],
    "chosen": [{"winner": "layerzero"}, {"winner": "vllm"}],
}
DATA = {
    "commit": "abc",
    "command": "python benchmarks/vllm.py --machine here",
    "machine": {"cpu": "a CPU", "cores": 2, "arch": "aarch64", "gpu": None, "load": 0.1},
    "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
    "sizes": {"num_hidden_layers": 8, "hidden_size": 768},
    "engine": {"enforce_eager": False, "max_num_batched_tokens": 256},
    "geometric_mean": 1.25,
    "models": [MODEL, {**MODEL, "cases": MODEL["cases"] * 2, "prompts": 40, "parted_beyond": 2}],
}


def test_a_kept_run_becomes_a_table_with_start_up_and_tokens_once_a_model():
    spec = importlib.util.spec_from_file_location("page_vllm", ROOT / "benchmarks" / "page_vllm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = module.vllm_section("here", DATA)
    rows = [line for line in said.splitlines() if line.startswith("| llama")]
    shape = "| llama float32 | decode B1, 1 × 32 + 48 | 50.0 | 40.0 | 1.25 |"
    assert rows == [
        f"{shape} 8.0 | 7.5 | 0 of 200 prompts |",
        f"{shape} 8.0 | 7.5 | 2 of 40 prompts |",
        f"{shape}  |  |  |",
    ]
    assert "1.25 in geometric mean; of 4 choices 2 are ours" in said and "compiled" in said
    case = {**CASE, "tokens_s": 21.0}
    alone = {**MODEL, "dtype": "bfloat16", "batched_tokens": 16, "stock_ended": "the engine ended with -4"}
    said = module.vllm_section("here", {**DATA, "models": [MODEL, {**alone, "cases": [case]}]})
    assert "| llama bfloat16 | decode B1, 1 × 32 + 48 | 21.0 | the engine ended with -4 |  |" in said
    assert "steps of at most 256 tokens (bfloat16: 16); two" in said


def script():
    spec = importlib.util.spec_from_file_location("benchmarks_vllm", ROOT / "benchmarks" / "vllm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Paced:
    """An engine that takes a given time for a prompt, or has ended."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def generate(self, prompts, new):
        if self.seconds is None:
            raise SystemExit("the engine ended with -4")
        return {"seconds": self.seconds * len(prompts)}


def test_pairs_of_engines_give_the_mean_of_their_ratios_and_ours_alone_gives_no_ratio():
    bench, cases = script(), {"decode B8": (8, 32, 48)}
    pairs = [list(bench.measured(Paced(stock), Paced(0.125), 3, 100, cases)) for stock in (0.25, 1.0)]
    (row,) = (bench.joined(case) for case in zip(*pairs, strict=True))
    assert (row["stock_tokens_s"], row["tokens_s"], row["times"]) == (76.8, 384.0, 4.0) and row["by_pair"] == [2.0, 8.0]
    assert row["seconds"] == [[[2.0] * 3, [1.0] * 3], [[8.0] * 3, [1.0] * 3]]  # every round is kept
    assert bench.ended(Paced(0.1)) is None
    assert bench.ended(Paced(None)) == "the engine ended with -4"
    row = bench.joined(list(bench.measured(None, Paced(0.125), 3, 100, cases)))
    assert row["tokens_s"] == 384.0 and "times" not in row and "stock_tokens_s" not in row


def test_figures_of_a_cpu_have_the_limits_and_leave_out_what_could_not_be_compared():
    bench = script()
    ended = {"model": "llama", "dtype": "bfloat16", "stock_ended": "the engine ended with -4"}
    quick = {**MODEL, "model": "qwen3", "dtype": "bfloat16", "start_s": 9.0, "cases": MODEL["cases"]}
    del quick["parted_beyond"]
    found = bench.figures_of([MODEL, {**ended, "cases": [{**CASE, "tokens_s": 21.0}]}, quick])
    assert found == {
        "llama float32: prompts whose tokens part": {"value": 0, "at_most": 0},
        "llama float32: start-up over stock's": {"value": 1.072, "at_most": 1.15},
        "llama float32, decode B1: over stock": {"value": 1.25, "at_least": 0.97},
        "qwen3 bfloat16: start-up over stock's": {"value": 1.2, "at_most": 1.15},
        "qwen3 bfloat16, decode B1: over stock": {"value": 1.25, "at_least": 1.15},
        "geometric mean": {"value": 1.25, "at_least": 1.05},
    }
