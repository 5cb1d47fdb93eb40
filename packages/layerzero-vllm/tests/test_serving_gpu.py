"""vLLM 0.26 on CUDA with the backend CUSTOM: the tokens of FLASH_ATTN, and a report of what was chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
Path(sys.argv[4]).write_text(json.dumps([best, sorted({type(layer.impl).__name__ for layer in layers})]))
"""


def served(
    tmp_path: Path, backend: str, mode: str, choice: str = "layerzero", before: str = ""
) -> tuple[list[float], list[str]]:
    """Best log-probabilities of each prompt's first token, which its attention gives; the classes of the layers."""
    out = tmp_path / f"{backend}-{choice}.json"
    words = [
        sys.executable,
        "-P",
        "-c",
        before + GENERATE,
        str(ROOT / "benchmarks" / "vllm.py"),
        str(tmp_path),
        backend,
        str(out),
    ]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the layers are looked at
    env |= {"LAYERZERO_VLLM": mode, "LAYERZERO_VLLM_CHOICE": choice, "LAYERZERO_VLLM_REPORTS": str(tmp_path / choice)}
    subprocess.run(words, check=True, env={**os.environ, **env})
    best, classes = json.loads(out.read_text())
    return best, classes


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> list[float]:
    """Of vLLM's own backend."""
    best, classes = served(tmp_path_factory.mktemp("stock"), "FLASH_ATTN", "off")
    assert classes == ["FlashAttentionImpl"]
    return best


BREAKS = """
from vllm.v1.worker import gpu_worker
from layerzero_triton import paged

def breaks(*given, **named):
    raise RuntimeError("broken on purpose")

prepare = gpu_worker.Worker.compile_or_warm_up_model
def warm_up(self, *given, **named):  # the choice is made, graphs are captured next
    paged.attend = breaks
    return prepare(self, *given, **named)

gpu_worker.Worker.compile_or_warm_up_model = warm_up
"""


def test_a_kernel_that_fails_while_graphs_are_captured_leaves_them_to_flash_attn(stock, tmp_path):
    theirs, classes = served(tmp_path, "CUSTOM", "on", before=BREAKS)
    assert max(abs(one - other) for one, other in zip(stock, theirs, strict=True)) < 0.1  # bfloat16
    told = report(tmp_path / "layerzero")
    (said,) = told["warnings"]
    assert said.startswith("a step that was ours is vLLM's") and "broken on purpose" in said
    assert classes == ["CudaImpl"] and told["steps"]["decode"] > 0


def report(folder: Path) -> dict[str, Any]:
    """Of the only worker."""
    (told,) = (json.loads(file.read_text()) for file in folder.glob("worker-*.json"))
    return told


def test_prompts_give_the_log_probabilities_of_flash_attn_and_the_report_names_our_kernel(stock, tmp_path):
    ours, classes = served(tmp_path, "CUSTOM", "on")
    assert max(abs(one - other) for one, other in zip(stock, ours, strict=True)) < 0.1  # bfloat16
    told = report(tmp_path / "layerzero")
    assert {one["winner"] for one in told["choices"]} == {"layerzero"}
    kernels = {one["phase"].split(" B")[0]: one["kernel"] for one in told["choices"]}
    assert set(kernels) == {"decode", "long decode", "prefill", "chunked prefill"}
    assert kernels["decode"] == kernels["long decode"] == "triton.paged_attention.split"
    assert told["breakers"] == {}
    assert classes == ["CudaImpl"]


def test_where_vllm_is_chosen_its_own_classes_serve(stock, tmp_path):
    theirs, classes = served(tmp_path, "CUSTOM", "on", choice="vllm")
    assert max(abs(one - other) for one, other in zip(stock, theirs, strict=True)) < 0.1  # bfloat16
    told = report(tmp_path / "vllm")
    assert {one["winner"] for one in told["choices"]} == {"vllm"}
    assert classes == ["FlashAttentionImpl"]
