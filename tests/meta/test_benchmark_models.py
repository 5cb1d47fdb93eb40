"""The benchmark of whole models: tokens of `generate` are compared, a step is divided by part, the page tells both."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("timing", "models_generate", "models_decoding", "models_overhead", "models_page", "models")
pytestmark = [pytest.mark.integration, pytest.mark.needs_package("transformers")]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    with torch.no_grad():
        yield {name: importlib.import_module(name) for name in NAMES}
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()


def _timed(contestants, sync, units, seconds):
    for call, rewind in contestants.values():
        call()
        rewind()
    return {"ms": dict.fromkeys(contestants, 2.0), "times faster": dict.fromkeys(contestants, 1.0), "rounds": 1}


def test_generate_says_whether_the_tokens_are_the_same_and_how_far(bench, llama):
    case = bench["models_generate"].generate_case
    ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(0))
    both = {"stock": (llama, {}), "patched": (copy.deepcopy(llama), {})}
    same = case(both, ids, 6, _timed, lambda: None, 0.0)
    assert (same["identical"], same["agree"], same["new"]) == (True, 6, 6)
    assert same["tokens_per_s"] == {"stock": 1000.0, "patched": 1000.0}
    other = copy.deepcopy(llama)
    other.lm_head.weight.data = other.lm_head.weight.data.flip(0).clone()  # the best token becomes another one
    found = case({**both, "patched": (other, {})}, ids, 6, _timed, lambda: None, 0.0)
    assert not found["identical"] and found["agree"] < 6
    section = bench["models_page"]._apart
    assert section(same) == "the same tokens" and section(found).startswith(f"the same {found['agree']} first tokens")


def test_a_step_is_divided_into_parts_that_make_a_whole(bench, llama):
    decoding = bench["models_decoding"]
    loop = decoding.Decoding(llama, torch.randint(3, 97, (1, 7)))
    found = decoding.shares(loop, 3)
    assert sum(found.values()) == pytest.approx(100.0, abs=1.0)
    assert found["linear"] > 0 and found["attention"] > 0 and found["Python"] > 0
    assert loop.cache.layers[0].keys.shape[2] == 7  # and the cache is as it was
    parts = {
        "<built-in method linear>": "linear", "<built-in method torch._C._nn.linear>": "linear",
        "<built-in method attention_decode>": "attention", "<layerzero.add_rms_norm>": "norm",
        "<built-in method torch.cat>": "cache", "<method 'argmax' of 'torch._C.TensorBase' objects>": "choice",
    }  # fmt: skip
    assert {name: decoding._part(name) for name in parts} == parts
    row = {"per cent of a step": {"stock": {"linear": 60.0, "norm": 0.4, "Python": 39.6}}}
    text = bench["models_page"]._step("decode", row)
    assert text.strip() == "A step of decode, as a profiler divides it: stock: linear 60 %, Python 40 %."


def test_generate_is_timed_in_every_way_and_the_page_shows_each(bench, llama):
    generate, page = bench["models_generate"], bench["models_page"]
    ways = generate.contestants_of(llama, generate.WAYS)
    assert list(ways) == ["stock static", "patched static", "graphs", "stock", "patched"]
    assert ways["stock"][0] is ways["stock static"][0] is llama and ways["graphs"][0] is not ways["patched"][0]
    ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(0))
    row = generate.generate_case(ways, ids, 6, _timed, lambda: None, 0.0)
    assert row["identical"]
    machine = {"gpu": "a GPU", "python": "3", "torch": "2", "load": 0.1}
    data = {
        "benchmark": "models_generate", "machine": machine, "command": "python …", "commit": "c", "transformers": "5",
        "ways": list(ways), "figures": {"llama-1b B2": row, "other B2": {"failed": "…"}},
    }  # fmt: skip
    text = page.models_section("here", data)
    assert "| llama-1b B2 | 1,000 (1.00×) |" in text and "6 new tokens after 5" in text and "other B2 | failed" in text


def test_figures_of_an_earlier_run_are_kept_only_of_the_same_commit_and_machine(bench):
    said = {"benchmark": "models_generate", "commit": "a", "transformers": "5", "ways": ["stock"]}
    earlier = {
        **said,
        "machine": {"gpu": "G", "load": 1.0},
        "command": "one",
        "weights": {"x": 1},
        "figures": {"x B1": {}},
    }
    found = {**said, "machine": {"gpu": "G", "load": 2.0}, "command": "two", "weights": {}, "figures": {}}
    other = copy.deepcopy({**found, "commit": "b"})
    bench["models"].keep_earlier(found, earlier)
    assert (found["command"], found["figures"], found["weights"]) == ("one; two", {"x B1": {}}, {"x": 1})
    bench["models"].keep_earlier(other, earlier)
    assert (other["command"], other["figures"]) == ("two", {})


def test_the_page_shows_batching_and_training_and_the_gates_judge_them(bench):
    from tools.gates import _OF

    said = {"machine": {"gpu": "a GPU", "python": "3", "torch": "2", "load": 0.1}, "command": "python …", "commit": "c"}
    batching = {
        **said, "benchmark": "models_batching", "transformers": "5", "architecture": "llama-1b", "prompts": 64,
        "tokens": 9000, "new": 128, "tokens_per_s": {"sdpa": 1000.0, "patched": 2000.0},
        "speedup": {"sdpa": 1.0, "patched": 2.0}, "same": {"sdpa": 64, "patched": 60},
    }  # fmt: skip
    assert "| patched | 2,000 (2.00×) | 60 of 64 |" in bench["models_page"].models_section("here", batching)
    assert list(_OF["models_batching"](batching)) == [("patched ÷ sdpa", 2.0, 1.3, True)]
    training = {
        **said, "benchmark": "training", "transformers": "5", "batch": 4, "length": 2048,
        "ms": {"stock": 200.0, "patched": 160.0, "liger": 180.0},
        "speedup": {"stock": 1.0, "patched": 1.25, "liger": 1.1},
        "peak_mib": {"stock": 9000, "patched": 5000, "liger": 5000},
        "loss": {"stock": 9.0, "patched": 9.0, "liger": 9.0},
    }  # fmt: skip
    text = bench["models_page"].training_section("here", training)
    assert "| patched | 160.0 (1.25×) | 5,000 | 9.0000 |" in text
    assert [figure[1] for figure in _OF["training"](training)] == [1.25, 1.0]
