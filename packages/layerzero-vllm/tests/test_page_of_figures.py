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
