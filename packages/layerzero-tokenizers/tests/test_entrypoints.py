"""The package is found by its entry point, keeps the plugin contract, and tells the truth about itself."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from layerzero.plugin.manager import load_plugins
from layerzero_verify.testing.kit import Kit
from tools.pretended_vendors import pretend

BACKENDS = ("tokenizers", "tiktoken", "sentencepiece", "own")
KERNELS = {
    "tokenizers.tokenize.fast", "tokenizers.detokenize.fast", "tiktoken.tokenize.bpe", "tiktoken.detokenize.bpe",
    "sentencepiece.tokenize.processor", "sentencepiece.detokenize.processor", "own.tokenize.library",
    "own.detokenize.library",
}  # fmt: skip


def test_the_installed_metadata_names_the_plugin():
    (found,) = entry_points(group="layerzero.backends", name="tokenizers")
    assert found.value == "layerzero_tokenizers.plugin"
    assert found.dist is not None and found.dist.name == "layerzero-tokenizers"


def test_it_keeps_the_contract_and_registers_without_importing_a_vendor(monkeypatch):
    monkeypatch.delitem(sys.modules, "layerzero_tokenizers.plugin", raising=False)
    with pretend(
        {"tokenizers": "0.23.3", "tiktoken": "0.14.0", "sentencepiece": "0.2.2"},
        dict.fromkeys(("tokenizers", "tiktoken", "sentencepiece"), ImportError("too early")),
    ) as imported:
        kit = Kit.open("tokenizers")
    assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert tuple(kit.capabilities) == BACKENDS and {spec.kernel_id for spec in kit.kernels} == KERNELS
    assert imported == []


def test_discovery_says_what_is_missing_and_how_to_get_it():
    with pretend({"tokenizers": None, "tiktoken": None, "sentencepiece": None}):
        record = load_plugins(env={}).record("tokenizers")
    assert record.backends == BACKENDS
    assert "BACKEND_NOT_INSTALLED" in {item.code.value for item in record.reasons}
    assert "pip install 'layerzero-tokenizers[hf]'" in record.fix
