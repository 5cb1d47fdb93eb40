"""`generate_batch` with `attn_implementation="layerzero"`: the tokens are those of transformers' own attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_models.transformers import batching

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers"),
]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()
transformers: Any = pytest.importorskip("transformers")


def prompts(count: int, longest: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(3, zoo.VOCAB, (length,), generator=draw).tolist() for length in lengths]


def batched(model: Any, given: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    """The new tokens of each prompt, in the order given; of a version's options, those that it has."""
    wanted = {"page_size": 256, "block_size": 256, "auto_switch_to_flash": False, "max_batch_tokens": 192} | options
    known = transformers.ContinuousBatchingConfig.__dataclass_fields__
    if "page_size" in known:
        del wanted["block_size"]  # the same thing by its older name
    config = transformers.ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
    greedy = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(given, generation_config=greedy, continuous_batching_config=config)
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.rsplit("_", 1)[-1]))]


def _noting(names: set[str], name: str, own: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        names.add(name)
        return own(*args, **kwargs)

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ops that batches ran."""
    names: set[str] = set()
    for name in ("varlen_attention", "paged_attention"):
        monkeypatch.setattr(batching, name, _noting(names, name, getattr(batching, name)))
    return names


@pytest.mark.req("R-HFT-01", "R-HFT-02")
def test_64_mixed_prompts_in_one_batch_give_the_tokens_of_sdpa(calls: set[str]) -> None:
    """Prompts in pieces beside decode steps, then steps alone; and again with the whole model patched."""
    model, given = zoo.made("llama", num_hidden_layers=2), prompts(64, 40)
    want = batched(model, given, 4, num_blocks=72)
    lz.enable_transformers()
    model.set_attn_implementation("layerzero")
    assert batched(model, given, 4, num_blocks=72) == want
    assert model.config._attn_implementation == "layerzero" and calls == {"varlen_attention", "paged_attention"}
    lz.patch(model)
    assert batched(model, given, 4, num_blocks=72) == want
    ids = torch.tensor(given[:1])
    alone = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert alone[0, ids.shape[1] :].tolist() == want[0]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_windows_soft_caps_and_sinks_are_honoured(name: str, calls: set[str]) -> None:
    """Layers with a window have no pages that a kernel could read: their steps are packed like prompts."""
    given = prompts(6, 20)
    if name == "gpt_oss":
        from layerzero_verify.models import _lively

        torch.manual_seed(0)
        config = transformers.GptOssConfig(
            vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
            max_position_embeddings=128, attn_implementation="eager",
        )  # fmt: skip
        model: Any = transformers.GptOssForCausalLM(config).eval()
        _lively(model, "gpt_oss", 0)
    else:
        model = zoo.made(name)
    want = [
        model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        for ids in given
    ]
    lz.patch(model)
    found = batched(model, given, 6, num_blocks=16)
    assert found == [tokens[0, len(ids) :].tolist() for tokens, ids in zip(want, given, strict=True)]
    assert calls == {"varlen_attention"}


def test_sinks_over_pages_take_their_share_of_the_softmax() -> None:
    """The decode step by itself, over pages in no order, with a row that holds no request."""
    from types import SimpleNamespace

    torch.manual_seed(0)
    keys, values = torch.randn(2, 7, 4, 2, 16)
    cache = SimpleNamespace(
        layer_index_to_group_indices={0: (0, 0)}, write_trash_index=24, block_size=4, num_key_value_heads=2,
        head_dim=16, key_cache=[keys.view(-1, 2, 16)], value_cache=[values.view(-1, 2, 16)],
    )  # fmt: skip
    offsets = torch.tensor([0, 6, 9, 9], dtype=torch.int32)
    tables = torch.tensor([[[3, 1], [0, -1], [-1, -1]]], dtype=torch.int32)
    query, key, value = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    sinks, before = torch.randn(4), values.clone()
    found, _ = batching.attend_batch(
        SimpleNamespace(layer_idx=0), query, key, value, None, s_aux=sinks, cache=cache, block_table=tables,
        cu_seq_lens_q=None, cu_seq_lens_k={"full_attention": offsets}, max_length_k={"full_attention": 1},
        max_length_q=1,
    )  # fmt: skip
    assert torch.equal(keys[1, 1], key[0, :, 0]) and torch.equal(values[0, 2], value[0, :, 1])
    untouched = torch.ones(7, 4, dtype=torch.bool)
    untouched[[1, 0, 6], [1, 2, 0]] = False
    assert torch.equal(values[untouched], before[untouched])
    for row, (pages, length) in enumerate([([3, 1], 6), ([0], 3)]):
        k, v = (item[pages].reshape(-1, 2, 16)[:length].repeat_interleave(2, 1) for item in (keys, values))
        scores = torch.einsum("hd,khd->hk", query[0, :, row], k) / 4
        share = torch.softmax(torch.cat([scores, sinks[:, None]], 1), 1)[:, :-1]
        torch.testing.assert_close(found[0, row], torch.einsum("hk,khd->hd", share, v))
    assert not found[0, 2].any()
