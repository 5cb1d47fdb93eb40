"""vLLM 0.26 on CUDA with the backend CUSTOM: the tokens of FLASH_ATTN, and a report of what was chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.workspace import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.integration, pytest.mark.needs_package("vllm")]

GENERATE = """
import json, runpy, sys
from pathlib import Path
harness = runpy.run_path(sys.argv[1])
model = harness["make_model"]("llama", Path(sys.argv[2]), harness["SMALL"])
from vllm import LLM, SamplingParams, TokensPrompt
options = {**harness["ENGINE"], "max_num_batched_tokens": 2048, "attention_backend": sys.argv[3]}
# a KV cache of a given size: what else the GPU does is not measured, and FlashInfer's GEMMs are not tuned for it
options |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**30, "enable_flashinfer_autotune": False}
engine = LLM(model=str(model), dtype="bfloat16", skip_tokenizer_init=True, **options)
sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=16, logprobs=2)
prompts = harness["mixed_prompts"](40, harness["SMALL"]["vocab_size"])
found = engine.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], sampling, use_tqdm=False)
best = [max(item.logprob for item in one.outputs[0].logprobs[0].values()) for one in found]
Path(sys.argv[4]).write_text(json.dumps(best))
"""


def best_logprobs(tmp_path: Path, backend: str, mode: str) -> list[float]:
    """Of the first token of each prompt: what the prompts' attention gives."""
    out = tmp_path / f"{backend}.json"
    words = [
        sys.executable,
        "-P",
        "-c",
        GENERATE,
        str(ROOT / "benchmarks" / "vllm.py"),
        str(tmp_path),
        backend,
        str(out),
    ]
    env = {"LAYERZERO_VLLM": mode, "LAYERZERO_VLLM_CHOICE": "layerzero", "LAYERZERO_VLLM_REPORTS": str(tmp_path)}
    subprocess.run(words, check=True, env={**os.environ, **env})
    found: list[float] = json.loads(out.read_text())
    return found


def test_prompts_give_the_log_probabilities_of_flash_attn_and_the_report_names_our_kernel(tmp_path):
    stock = best_logprobs(tmp_path, "FLASH_ATTN", "off")
    ours = best_logprobs(tmp_path, "CUSTOM", "on")
    assert max(abs(one - other) for one, other in zip(stock, ours, strict=True)) < 0.1  # bfloat16
    (told,) = (json.loads(file.read_text()) for file in tmp_path.glob("worker-*.json"))
    winners = {one["phase"].split(" B")[0]: one["winner"] for one in told["choices"]}
    assert winners == {"decode": "vllm", "prefill": "layerzero", "chunked prefill": "layerzero"}
    assert told["breakers"] == {}
