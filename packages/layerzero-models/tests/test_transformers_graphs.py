"""`lz.patch(model, graphs=True)`: the same tokens as the unpatched model, by captured steps or with a reason.

Without a CUDA device the steps run uncaptured (`eager`): the same code over the same buffers, masks and positions.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_models.patching import GraphReport
from layerzero_models.transformers import buffers, graphs

pytestmark = [pytest.mark.integration, pytest.mark.needs_package("transformers")]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


def stepping(model: Any, **options: Any) -> Any:
    """The model with graphs, its steps taken on this CPU."""
    lz.patch(model, graphs=True, **options)
    vars(model)["_layerzero"].eager = True
    return model


def report(model: Any) -> GraphReport:
    found = lz.patched(model)
    assert found is not None and found.graphs is not None
    return found.graphs


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "gpt2"])
def test_steps_give_the_tokens_of_the_unpatched_model(name: str, side: str | None) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, side)
    want = zoo.generated(model, given)
    stepping(model)
    for call in (1, 2):  # the second one finds the buffers of the first
        assert torch.equal(zoo.generated(model, given), want)
        found = report(model)
        assert found.steps == 9 * call and found.captured == ((2, 256),) and not found.plain
    if side is None:  # a mask that hides nothing is none
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        assert torch.equal(zoo.generated(model, given), want) and report(model).captured == ((2, 256),)


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
STEPPED: dict[str, dict[str, Any]] = {
    "sampling": SAMPLING,
    "several sequences": {**SAMPLING, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams that are sampled": {"num_beams": 3, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "repetition penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "prompt in pieces": {"prefill_chunk_size": 5},
    "end of text": {"eos_token_id": list(range(60)), "min_new_tokens": 0},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


def drawn(model: Any, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """What `generate` writes, with the same random numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        found = zoo.generated(model, given, **options)
    return found if isinstance(found, torch.Tensor) else found.sequences


@pytest.mark.parametrize("name", ["llama", "mistral"])  # mistral's layers have a sliding window
@pytest.mark.parametrize("side", [None, "left"])
def test_every_way_of_decoding_one_token_at_a_time_is_stepped(name: str, side: str | None) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, side)
    want = {way: drawn(model, given, **options) for way, options in STEPPED.items()}
    stepping(model)
    for way, options in STEPPED.items():
        before = report(model).steps
        assert torch.equal(drawn(model, given, **options), want[way]), way
        assert report(model).steps - before == want[way].shape[1] - given["input_ids"].shape[1] - 1, way
    assert not report(model).plain


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_ways_take_the_plain_path_with_their_reason(name: str) -> None:
    from transformers import DynamicCache, StaticCache

    model, assistant = zoo.made(name), zoo.made(name, num_hidden_layers=1)
    one = {"input_ids": zoo.tokens(1)}
    ways: dict[str, dict[str, Any]] = {
        "assisted_generation takes other steps": {"assistant_model": assistant},
        "assisted_generation takes": {"prompt_lookup_num_tokens": 3},
        "the caller's own cache (DynamicCache)": {"past_key_values": DynamicCache(config=model.config)},
        "the caller's own cache (StaticCache)": {"past_key_values": StaticCache(config=model.config, max_cache_len=32)},
        "use_cache=False": {"use_cache": False},
        "hidden states are asked for": {"output_hidden_states": True, "return_dict_in_generate": True},
    }
    want = drawn(model, one)
    stepping(model)
    for count, (why, options) in enumerate(ways.items(), 1):
        assert torch.equal(drawn(model, one, **options), want), why
        found = report(model)
        assert found.steps == 0 and sum(found.plain.values()) == count, why
        assert any(why in reason for reason in found.plain), why


def test_streamers_and_stopping_criteria_see_every_token() -> None:
    model = zoo.made("llama")
    given = {"input_ids": zoo.tokens(1)}

    def written() -> tuple[list[int], list[int]]:
        put: list[int] = []

        class Streamer:
            def put(self, value: torch.Tensor) -> None:
                put.extend(value.flatten().tolist())

            def end(self) -> None:
                put.append(-1)

        def enough(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), ids.shape[1] >= 18, device=ids.device)

        from transformers import StoppingCriteriaList

        out = zoo.generated(model, given, streamer=Streamer(), stopping_criteria=StoppingCriteriaList([enough]))
        return out[0].tolist(), put

    want = written()
    stepping(model)
    assert written() == want and len(want[0]) == 18 and want[1][-1] == -1
    assert report(model).steps == 5


def test_the_end_is_noticed_late_only_where_nobody_else_looks_at_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers then does needs events of a device: here only the question is asked (GPU tests run it)."""
    from transformers import LogitsProcessorList
    from transformers.generation import utils

    model = stepping(zoo.made("llama"))
    asked: list[bool] = []
    support = utils.DeferredStopCheck.is_supported

    def is_supported(device: Any, cache: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(support(torch.device("cuda"), cache, *args, **kwargs))
        return False

    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(is_supported))
    given = {"input_ids": zoo.tokens(1)}
    seeing = LogitsProcessorList([lambda ids, scores: scores])
    for options in ({}, {"do_sample": True}, {"logits_processor": seeing}, {"use_cache": False}):
        zoo.generated(model, given, **options)
    lz.unpatch(model)
    zoo.generated(model, given)
    assert asked == [True, False, False, False, False]


@pytest.mark.parametrize("side", [None, "left"])
def test_stop_strings_end_a_text(side: str | None) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"abcdef": 0, **{f"w{i}.": i for i in range(1, zoo.VOCAB)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="abcdef"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w1.", eos_token="w2.")
    model = zoo.made("llama")
    given = {"input_ids": zoo.tokens(1)} if side is None else zoo.inputs(model, side)
    plain = zoo.generated(model, given)
    options: dict[str, Any] = {"stop_strings": [f"w{int(row[-3])}." for row in plain], "tokenizer": tokenizer}
    want = zoo.generated(model, given, min_new_tokens=0, **options)
    assert want.shape[1] < plain.shape[1]
    stepping(model)
    assert torch.equal(zoo.generated(model, given, min_new_tokens=0, **options), want)
    assert report(model).steps == want.shape[1] - 13


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so small that a short text grows through several."""
    monkeypatch.setattr(buffers, "_SMALLEST", 16)
    monkeypatch.setattr(graphs, "_AHEAD", 4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("side", [None, "left"])
def test_a_text_grows_through_buckets(small: None, name: str, side: str | None) -> None:
    model = zoo.made(name)
    given = zoo.inputs(model, side)
    length = {"max_new_tokens": 40, "min_new_tokens": 40}
    want, beams = drawn(model, given, **length), drawn(model, given, num_beams=2, **length)
    stepping(model)
    assert torch.equal(drawn(model, given, **length), want)
    assert report(model).captured == ((2, 16), (2, 24), (2, 32), (2, 48), (2, 64)) and report(model).steps == 39
    assert torch.equal(drawn(model, given, num_beams=2, **length), beams) and report(model).steps == 78


def test_a_returned_cache_is_the_callers_and_goes_on() -> None:
    model = zoo.made("llama")
    given = zoo.inputs(model)
    whole = drawn(model, given, max_new_tokens=16, min_new_tokens=16)
    stepping(model)
    first = zoo.generated(model, given, max_new_tokens=8, min_new_tokens=8, return_dict_in_generate=True)
    held = first.past_key_values
    other = {"input_ids": zoo.tokens(2, 12, seed=9)}
    drawn(model, other)  # has buffers of its own while the first cache lives
    assert held.get_seq_length() == 19 and held.layers[0].keys.shape[2] == 19
    rest = model.generate(
        first.sequences, past_key_values=held, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert torch.equal(rest, whole) and not report(model).plain
    with torch.no_grad():  # outside of generate nothing is stepped
        before = report(model).steps
        model(zoo.tokens(2, 1), past_key_values=held, use_cache=True)
        assert report(model).steps == before and held.get_seq_length() == 28
    keys = held.layers[1].keys
    kept = keys.clone()
    held.crop(-3)
    assert held.get_seq_length() == keys.shape[2] - 3
    assert torch.equal(held.layers[1].keys, keys[:, :, :-3])
    held.batch_select_indices(torch.tensor([1]))  # of another shape: from here on the cache is by itself
    assert torch.equal(held.layers[1].keys, keys[1:, :, :-3])
    for _ in range(2):
        drawn(model, other)
    assert torch.equal(keys, kept) and torch.equal(held.layers[1].keys, keys[1:, :, :-3])
    assert report(model).captured == ((2, 256), (2, 256))


def test_memory_is_bounded_and_shown() -> None:
    model = zoo.made("llama")
    token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    want = {batch: drawn(model, {"input_ids": zoo.tokens(batch)}) for batch in (1, 2, 3)}
    stepping(model, graph_memory=2 * 256 * token)
    for batch in (1, 2, 1, 3):
        assert torch.equal(drawn(model, {"input_ids": zoo.tokens(batch)}), want[batch])
        found = report(model)
        assert found.limit == 2 * 256 * token >= found.memory
        assert batch == 3 or (found.memory == batch * 256 * token and found.captured == ((batch, 256),))
    assert found.steps == 27 and list(found.plain.values()) == [1]
    assert "3 × 256 tokens are beyond graph_memory" in next(iter(found.plain))
    assert "generate on the plain path: buffers for 3" in str(lz.patched(model))


def test_captures_are_made_anew_when_weights_move_or_the_policy_changes() -> None:
    model = stepping(zoo.made("llama"))
    given = zoo.inputs(model)

    def latest() -> Any:
        zoo.generated(model, given)
        (held,) = vars(model)["_layerzero"]._lender.kept
        (step,) = held.steps.values()
        return step

    first = latest()
    assert latest() is first
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    second = latest()
    assert second is not first
    lz.lock("attention", "reference.attention.plain")
    try:
        third = latest()
    finally:
        lz.unlock("attention")
    assert third is not second


def test_what_a_graph_would_not_see_is_left_to_the_plain_path() -> None:
    model = stepping(zoo.made("llama"))
    given = zoo.inputs(model)
    seen: list[Any] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(args[0]))
    zoo.generated(model, given)
    assert len(seen) == 10 and report(model).steps == 0
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        zoo.generated(model, given)
    model.train()
    zoo.generated(model, given)
    model.eval()
    assert report(model).plain == {"model.layers.1.mlp has a hook": 1, "under autocast": 1, "the model is training": 1}
    with torch.inference_mode():
        inside = zoo.generated(model, given)
    assert torch.equal(inside, zoo.generated(model, given)) and report(model).steps == 18


def test_a_step_that_differs_from_the_model_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.made("llama")
    given = zoo.inputs(model)
    want = zoo.generated(model, given)
    stepping(model)
    own = graphs.Step._mask
    monkeypatch.setattr(graphs.Step, "_mask", lambda self, kind, place, visible: own(self, kind, place - 5, visible))
    for count in (1, 2):
        assert torch.equal(zoo.generated(model, given), want)
        ((why, calls),) = report(model).plain.items()
        assert "its replayed logits are" in why and calls == count and report(model).captured == ()


def test_it_comes_and_goes_with_the_patch() -> None:
    model = zoo.made("llama")
    before = zoo.traces(model)
    lz.patch(model)
    lz.patch(model, graphs=True)  # added to a patched model
    found = report(model)
    assert found.plain == {"CUDA graphs need a CUDA device, the model is on cpu": 0} and found.captured == ()
    zoo.generated(model, zoo.inputs(model))
    assert list(report(model).plain.values()) == [1]
    other = copy.deepcopy(model)
    vars(other)["_layerzero"].eager = True
    zoo.generated(other, zoo.inputs(other))
    assert report(other).steps == 9 and report(model).steps == 0
    lz.unpatch(model)
    after = zoo.traces(model)
    assert after.pop("storages") == before.pop("storages") and after == before


@pytest.mark.parametrize(("name", "why"), [("t5", "it is an encoder-decoder"), ("vit", "it has no generate")])
def test_models_without_such_steps_are_left(name: str, why: str) -> None:
    found = lz.patched(lz.patch(zoo.made(name), graphs=True))
    assert found is not None and found.graphs is None
    assert [item.why for item in found.left if item.name == ""] == [f"graphs: {why}"]


def test_a_model_with_a_state_besides_keys_and_values_is_left() -> None:
    import transformers as t

    mamba = t.MambaForCausalLM(t.MambaConfig(vocab_size=31, hidden_size=16, state_size=4, num_hidden_layers=1))
    found = lz.patched(lz.patch(mamba, graphs=True))
    assert found is not None and found.graphs is None
    assert any(item.why == "graphs: it makes caches or masks of its own" for item in found.left)
