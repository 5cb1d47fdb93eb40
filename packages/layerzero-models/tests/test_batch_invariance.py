"""A whole model under `batch_invariant`: the bits of a sequence alone, in a batch of 32, and prefilled in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz

pytestmark = [pytest.mark.integration, pytest.mark.needs_package("transformers")]

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.needs_package("layerzero_cpu")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.needs_package("layerzero_triton")]),
]
BATCH, PROMPT = 32, 75


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    lz.reset()
    yield
    lz.reset()


def llama(device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return LlamaForCausalLM(config).eval().to(device, dtype)


def prompts(device: str) -> Tensor:
    return torch.randint(0, 128, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)


def in_pieces(model: Any, ids: Tensor, *sizes: int) -> Tensor:
    """The logits of prompts that come in pieces of these sizes."""
    from transformers import DynamicCache

    cache, found = DynamicCache(config=model.config), []
    for piece in ids.split(sizes, dim=1):
        found.append(model(piece, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_keeps_its_bits_alone_in_a_batch_and_in_pieces(device: str) -> None:
    model, ids = llama(device), prompts(device)
    with torch.no_grad():
        lz.patch(model)
        alone, splits = model(ids[:1]).logits, [(1, 74), (1, 30, 7, 37), (64, 11)]
        free = torch.equal(model(ids).logits[:1], alone)
        free = free and all(torch.equal(in_pieces(model, ids[:1], *sizes), alone) for sizes in splits)
        lz.unpatch(model)
        lz.configure(batch_invariant=True)
        lz.patch(model)
        together = model(ids).logits
        for row in (0, 7, 31):
            alone = model(ids[row : row + 1]).logits
            assert torch.equal(together[row : row + 1], alone)
            assert torch.equal(in_pieces(model, ids[row : row + 1], 1, 30, 7, 37), alone)
            assert torch.equal(in_pieces(model, ids[[row, 3, 9]], 64, 11)[:1], alone)
    assert not free, "without the setting nothing is promised: this test would show nothing"


@pytest.mark.needs_package("layerzero_cpu")
def test_a_kernel_for_few_rows_gets_no_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a feed-forward block of a few rows is one call, otherwise three: other roundings, other bits."""
    from layerzero_models.transformers import patching

    monkeypatch.setattr(patching, "few_rows", lambda op, weight: 16)
    called: list[str] = []
    with lz.scoped(batch_invariant=True):
        model, ids = lz.patch(llama("cpu")), prompts("cpu")
        real = patching.quick.public
        monkeypatch.setattr(patching.quick, "public", lambda op, *rest: called.append(op) or real(op, *rest))
        with torch.no_grad():
            assert torch.equal(in_pieces(model, ids[:1], 1, 30, 7, 37), model(ids[:1]).logits)
    assert "mlp" not in called


@pytest.mark.parametrize("device", DEVICES)
def test_generated_logits_are_the_same_alone_and_in_a_batch(device: str) -> None:
    lz.configure(batch_invariant=True)
    model, ids = llama(device), prompts(device)
    lz.patch(model)
    told = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def generated(given: Tensor) -> list[Tensor]:
        mask = torch.ones_like(given)
        return list(model.generate(given, attention_mask=mask, pad_token_id=0, eos_token_id=None, **told).logits)

    together = generated(ids)
    for row in (0, 20):
        alone = generated(ids[row : row + 1])
        assert len(alone) == 6
        for step, logits in zip(together, alone, strict=True):
            assert torch.equal(step[row : row + 1], logits)


@pytest.mark.needs_package("layerzero_cpu")
def test_a_model_patched_under_the_setting_leaves_no_product_to_torch() -> None:
    with lz.scoped(batch_invariant=True):
        model = lz.patch(llama("cpu"))
    report = lz.patched(model)
    assert report is not None
    assert sum(item.op == "linear" for item in report.patched) == 2 * 4 + 1
    assert sum(item.op == "embedding" for item in report.patched) == 1
