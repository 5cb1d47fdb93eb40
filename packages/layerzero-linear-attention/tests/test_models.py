"""Tiny models of transformers, patched: the same tokens, what runs is in the report, and out again."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
MODELS = {
    "Qwen3Next": (
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 24,
            **ATTENTION,
            **EXPERTS,
        },
        ("gated_delta_rule", "causal_conv1d"),
    ),
    "KimiLinear": (
        {
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            **EXPERTS,
        },
        ("kimi_delta_attention", "causal_conv1d"),
    ),
    "Mamba2": (
        {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2},
        ("mamba2_scan", "causal_conv1d"),
    ),
}


def made(name, **more):
    """A tiny model with lively random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name][0], **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5 * 1.5)
    return model


def prompt(rows=2, tokens=37):
    """Token ids, the first row shorter and padded on the left."""
    ids = torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :5], mask[0, :5] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_patched_tokens_and_logits_are_the_models_own(name):
    model, given = made(name), prompt()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    logits, tokens = model(**given).logits, model.generate(**given, **options)
    beams = model.generate(**given, **options, num_beams=2)
    lz.patch(model)
    report = lz.patched(model)
    ops = {item.op for item in report.patched if "conv1d" in item.op}
    assert ops and all(set(MODELS[name][1]) == set(op.split(" + ")) for op in ops)
    torch.testing.assert_close(model(**given).logits, logits, rtol=2e-4, atol=2e-4)
    assert torch.equal(model.generate(**given, **options), tokens)
    assert torch.equal(model.generate(**given, **options, num_beams=2), beams)
    lz.unpatch(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_prompt_that_comes_in_pieces_gives_the_same_logits(name):
    model = lz.patch(made(name))
    ids = prompt()["input_ids"][1:]
    whole = model(ids).logits
    word = "cache_params" if name == "Mamba2" else "past_key_values"
    cache, pieces = None, []
    for begin, end in ((0, 20), (20, 36), (36, 37)):
        found = model(ids[:, begin:end], use_cache=True, **{word: cache})
        cache = getattr(found, word)
        pieces.append(found.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_the_step_can_be_left_out_and_other_models_stay_as_they_are():
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    before = file.torch_chunk_gated_delta_rule
    other, model = made("Qwen3Next"), lz.patch(made("Qwen3Next"), skip=("linear_attention",))
    assert not [item for item in lz.patched(model).patched if "delta" in item.op]
    lz.unpatch(model)
    lz.patch(model)
    assert file.torch_chunk_gated_delta_rule is before
    assert not [module for module in other.modules() if "forward" in vars(module)]


def test_a_patched_model_has_the_gradients_of_its_own():
    model, given = made("Qwen3Next"), prompt(tokens=9)
    wanted = torch.autograd.grad(model(**given).logits.square().sum(), list(model.parameters()), allow_unused=True)
    lz.patch(model)
    found = torch.autograd.grad(model(**given).logits.square().sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)
