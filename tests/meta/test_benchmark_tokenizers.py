"""The kept tokenization figures: complete, from one run, with a cache inside its budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEPT = sorted(BENCHMARKS.glob("results/*/tokenizers.json"))


def test_there_is_a_kept_run():
    assert KEPT


@pytest.mark.req("R-TOK-08", "R-TOK-09")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_run_measured_every_library_and_the_prompt_cache_pays(path):
    data = json.loads(path.read_text())
    assert data["command"].startswith("python benchmarks/") and data["commit"] not in ("", "unknown")
    assert set(data["libraries"]) == {"tokenizers", "tiktoken", "sentencepiece"}
    assert data["cache"]["bytes"] <= data["cache"]["max_bytes"]
    for name, item in data["libraries"].items():
        assert 1_900 <= item["system_tokens"] <= 2_200, name
        assert item["batch_us"]["lz"] <= data["limits"]["batch of 1 000"] * item["batch_us"]["own"], name
        assert item["ratios"]["selection µs"] <= data["limits"]["selection µs"], name
        if item["splits"]:
            assert item["ratios"]["system prompt"] >= data["limits"]["system prompt"], name
