"""Tiny models of transformers, patched: the same tokens, what runs is in the report, and out again."""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch

import layerzero as lz
from layerzero_linear_attention.architectures import MODELS
from layerzero_linear_attention.transformers import by_itself

transformers = pytest.importorskip("transformers")


def made(name):
    """A tiny model with lively random weights."""
    torch.manual_seed(0)
    prefix, kind, sizes = MODELS[name][:3]
    model = getattr(transformers, prefix + kind)(getattr(transformers, f"{prefix}Config")(**sizes)).eval()
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
    assert ops and all(set(MODELS[name][3]) == set(op.split(" + ")) for op in ops)
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
    word = "cache_params" if name == "mamba2" else "past_key_values"
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
    other, model = made("qwen3_next"), lz.patch(made("qwen3_next"), skip=("linear_attention",))
    assert not [item for item in lz.patched(model).patched if "delta" in item.op]
    lz.unpatch(model)
    lz.patch(model)
    assert file.torch_chunk_gated_delta_rule is before
    assert not [module for module in other.modules() if "forward" in vars(module)]


def test_a_patched_model_has_the_gradients_of_its_own():
    model, given = made("qwen3_next"), prompt(tokens=9)
    wanted = torch.autograd.grad(model(**given).logits.square().sum(), list(model.parameters()), allow_unused=True)
    lz.patch(model)
    found = torch.autograd.grad(model(**given).logits.square().sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_row_padded_on_the_left_is_the_row_alone(name):
    model, given = lz.patch(made(name)), prompt()
    alone = model(given["input_ids"][:1, 5:]).logits
    padded = model(**given).logits[:1, 5:]
    torch.testing.assert_close(padded, alone, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_states_of_a_cache_are_those_of_the_model_itself(name):
    model, ids = made(name), prompt()["input_ids"][1:]
    word = "cache_params" if name == "mamba2" else "past_key_values"

    def states():
        """Every tensor of the cache after a prompt in two pieces and two tokens."""
        cache = None
        for begin, end in ((0, 20), (20, 35), (35, 36), (36, 37)):
            cache = model(ids[:, begin:end], use_cache=True, **{word: cache})[word]
        found = [(layer.conv_states, layer.recurrent_states) for layer in cache.layers if hasattr(layer, "conv_states")]
        return [
            state
            for pair in found
            for several in pair
            for state in (several.values() if isinstance(several, dict) else several)
            if state is not None
        ]

    wanted = [state.clone() for state in states()]
    lz.patch(model)
    found = states()
    assert len(found) == len(wanted) >= 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_the_calls_of_a_model_are_recorded_tuned_and_warmed_up(tmp_path, monkeypatch):
    from layerzero_tune.timing import host_load

    monkeypatch.setattr(host_load, "ticks", lambda path="": None)  # the host of a test serves others
    monkeypatch.setattr(host_load, "_PAUSES", ())
    model, traffic, database = lz.patch(made("qwen3_next")), tmp_path / "traffic.json", tmp_path / "perf.db"
    with lz.record(traffic):
        model.generate(**prompt(), max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    recorded = json.loads(traffic.read_text())
    ours = {"gated_delta_rule", "causal_conv1d"}
    recorded["calls"] = [item for item in recorded["calls"] if item["context"]["op"] in ours]
    traffic.write_text(json.dumps(recorded))
    tuned = lz.tune(traffic, database=database, budget=60.0)
    assert len(tuned.outcomes) >= 4  # prompt and token of both
    for outcome in tuned.outcomes:
        op = outcome.name.partition(" ")[0]
        assert {f"linear_attention.{op}.native", f"torch.{op}.baseline"} <= set(outcome.trial.times)
    assert lz.warmup(traffic, background=False).calls == len(recorded["calls"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_compiled_model_is_the_eager_one(name):
    model, given = made(name), prompt(tokens=12)
    wanted = model(**given, use_cache=False).logits
    lz.patch(model)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(**given, use_cache=False).logits, wanted, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_a_compiled_layer_calls_the_ops():
    model = lz.patch(made("mamba2"))
    x, layer = torch.randn(2, 9, 64), model.backbone.layers[0].mixer
    wanted, graphs = layer(x), []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, backend=backend)(x), wanted, rtol=1e-4, atol=1e-4)
    assert all(any(op in text for text in graphs) for op in ("mamba2_scan", "causal_conv1d"))


def test_a_model_computes_by_itself_where_a_package_stands_in_front_of_its_code(monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2

    own, calls = modeling_mamba2.mamba2_chunk_scan, []

    def torch_code(x, dt, A, B, C, chunk_size, D, dt_bias, dt_softplus, dt_limit, initial_states, return_final_states):
        calls.append(x.shape)
        return own(
            x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
            initial_states=initial_states, return_final_states=return_final_states,
        )  # fmt: skip

    @functools.wraps(torch_code)
    def package(*args, **options):
        raise RuntimeError("the package was called")

    model, ids = made("mamba2"), torch.randint(1, 131, (2, 24))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", package)
        with pytest.raises(RuntimeError, match="the package was called"):
            model(ids, use_cache=False)
        by_itself(model)
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted)
        alone = len(calls)
        assert alone
        other = lz.patch(copy.deepcopy(model))  # which has its own forward by then, and is patched all the same
        torch.testing.assert_close(other(ids, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-3)
        assert len(calls) == alone and any("mamba2_scan" in item.op for item in lz.patched(other).patched)
        lz.unpatch(other)
        torch.testing.assert_close(other(ids, use_cache=False).logits, wanted)
        assert len(calls) > alone
