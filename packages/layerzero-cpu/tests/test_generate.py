"""`generate()` of a patched Llama on the CPU kernels: the tokens of the unpatched one, and who computed them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_verify.thresholds import LOGITS

pytestmark = [pytest.mark.integration, pytest.mark.needs_package("transformers")]
VOCAB = 211


def llama(dtype: torch.dtype = torch.float32) -> Any:
    """A tiny one whose logits differ by much more than rounding, so that greedy tokens are a fair question."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 1.0 if "embed" in name else 2.0 * parameter.shape[1] ** -0.5)
    return model.to(dtype)


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch))


def generated(model: Any, batch: int, new: int) -> torch.Tensor:
    found: torch.Tensor = model.generate(prompt(batch, 9), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return found


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    lz.reset()
    yield
    lz.reset()


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_in_float32_are_identical_and_every_product_of_a_step_is_ours(batch: int) -> None:
    model = llama()
    want = generated(model, batch, 48)
    assert want[0, 9:].unique().numel() > 8  # it says more than one word
    lz.patch(model)
    report = lz.patched(model)
    assert report is not None and sum(item.op == "linear" for item in report.patched) == 3 * 4 + 1
    with lz.record() as recording:
        got = generated(model, batch, 48)
    assert torch.equal(got, want)
    products = [call for call in recording.traffic.calls if call.context.op == "linear"]
    steps = [call for call in products if dict(call.context.dims)["rows"] == batch]
    assert {lz.which("linear", call.context) for call in steps} == {"cpu.linear.few_rows"}
    assert sum(call.count for call in steps) >= 47 * (3 * 4 + 1)  # the first token comes with the prompt
    lz.unpatch(model)
    assert torch.equal(generated(model, batch, 48), want)


def test_bfloat16_logits_are_no_further_from_float32_than_the_unpatched_models() -> None:
    stock = llama(torch.bfloat16)
    patched = lz.patch(copy.deepcopy(stock))
    ids = prompt(2, 4)
    with torch.no_grad():
        truth = copy.deepcopy(stock).float()(ids).logits
        own, ours = ((model(ids).logits.float() - truth).abs().mean().item() for model in (stock, patched))
    assert ours <= LOGITS + 1.25 * own


@pytest.mark.req("R-PT-06")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_inference_mode_give_what_they_give_the_unpatched_model(dtype: torch.dtype) -> None:
    stock = llama()
    patched = lz.patch(copy.deepcopy(stock))
    ids = prompt(1, 3)
    with torch.inference_mode():
        assert (stock(ids).logits - patched(ids).logits).abs().max().item() < LOGITS / 10
        truth = stock(ids).logits
        with torch.autocast("cpu", dtype=dtype):
            own, ours = stock(ids).logits, patched(ids).logits
    assert ours.dtype is own.dtype is dtype
    assert (ours - truth).abs().mean().item() <= LOGITS + 1.25 * (own - truth).abs().mean().item()
