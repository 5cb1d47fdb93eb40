"""`attn_implementation="layerzero"`: what reaches the kernel, and that every mask means what transformers means."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero_models.transformers import attending
from layerzero_verify.thresholds import LOGITS

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


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every call of `lz.attention` was told, beside its tensors."""
    calls: list[dict[str, Any]] = []
    real = attending.attention

    def listening(
        q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: Any = False, *a: Any, **kw: Any
    ) -> Any:
        calls.append({"mask": mask, "causal": causal, "window": kw.get("window"), "q": q.shape[2], "k": k.shape[2]})
        return real(q, k, v, mask, p, causal, *a, **kw)

    monkeypatch.setattr(attending, "attention", listening)
    return calls


def with_layerzero(name: str, **changes: Any) -> Any:
    lz.enable_transformers()
    return zoo.made(name, attn_implementation="layerzero", **changes)


@pytest.mark.req("R-HFT-01")
@pytest.mark.parametrize("name", zoo.ALL[:-1])
def test_the_implementation_alone_gives_the_logits_of_eager_attention(name: str) -> None:
    eager, ours = zoo.made(name, attn_implementation="eager"), with_layerzero(name)
    assert ours.config._attn_implementation == "layerzero"
    for side in (None, "left", "right"):
        given = zoo.inputs(eager, side)
        assert (zoo.logits(ours, given) - zoo.logits(eager, given)).abs().max().item() < LOGITS / 10


def test_without_its_mask_function_left_padding_would_be_wrong() -> None:
    """What registering only the attention function does: transformers then makes no mask at all."""
    from transformers import AttentionMaskInterface

    model = zoo.made("llama", attn_implementation="eager")
    given = zoo.inputs(model, "left")
    want = zoo.logits(model, given)
    lz.patch(model)
    assert (zoo.logits(model, given) - want).abs().max().item() < LOGITS / 10
    registered = AttentionMaskInterface._global_mapping.pop("layerzero")
    try:
        assert (zoo.logits(model, given) - want).abs().max().item() > 0.1
    finally:
        AttentionMaskInterface.register("layerzero", registered)


@pytest.mark.req("R-HFT-02")
def test_no_mask_is_made_where_causality_says_it_all(seen: list[dict[str, Any]]) -> None:
    model = with_layerzero("llama")
    zoo.generated(model, zoo.inputs(model), max_new_tokens=3, min_new_tokens=3)
    prefill, decode = seen[:3], seen[3:]
    assert [(c["mask"], c["causal"], c["q"], c["k"]) for c in prefill] == [(None, True, 12, 12)] * 3
    assert [(c["mask"], c["causal"], c["q"]) for c in decode] == [(None, False, 1)] * 6


def test_the_window_reaches_the_kernel_as_a_window(seen: list[dict[str, Any]]) -> None:
    model = with_layerzero("mistral")
    zoo.generated(model, zoo.inputs(model), max_new_tokens=2, min_new_tokens=2)
    assert all(call["mask"] is None for call in seen)
    assert [call["window"] for call in seen[:3]] == [(4, 0)] * 3  # transformers' 5 counts the token itself


def test_a_padded_batch_comes_with_a_mask_and_padding_alone_decides(seen: list[dict[str, Any]]) -> None:
    model = with_layerzero("mistral")
    zoo.logits(model, zoo.inputs(model, "left"))
    assert all(call["mask"] is not None and call["window"] is None for call in seen)


def test_later_chunks_of_a_prompt_are_causal_from_the_end(seen: list[dict[str, Any]]) -> None:
    model = with_layerzero("llama")
    want = zoo.logits(zoo.made("llama"), zoo.inputs(model))
    with torch.no_grad():
        first = model(zoo.tokens()[:, :7], use_cache=True)
        got = model(zoo.tokens()[:, 7:], past_key_values=first.past_key_values).logits
    assert [(c["causal"], c["q"], c["k"]) for c in seen[3:]] == [("bottom_right", 5, 12)] * 3
    assert all(call["mask"] is None for call in seen)
    assert (got - want[:, 7:]).abs().max().item() < LOGITS / 10


@pytest.mark.req("R-HFT-02")
def test_a_static_cache_is_read_as_far_as_it_is_filled(seen: list[dict[str, Any]]) -> None:
    from transformers import StaticCache

    model = with_layerzero("llama")
    ids = zoo.tokens()
    want = zoo.logits(zoo.made("llama"), {"input_ids": ids})
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        got = [model(part, past_key_values=cache).logits for part in (ids[:, :9], *ids[:, 9:].split(1, 1))]
    assert (torch.cat(got, 1) - want).abs().max().item() < LOGITS / 10
    calls = [(call["mask"], call["q"], call["k"]) for call in seen]
    assert calls == [(None, 9, 9)] * 3 + [(None, 1, 10)] * 3 + [(None, 1, 11)] * 3 + [(None, 1, 12)] * 3


@pytest.mark.req("R-HFT-02")
@pytest.mark.parametrize(
    ("name", "window", "options"),
    [
        ("llama", None, {}),
        ("llama", None, {"num_beams": 3}),
        ("llama", None, {"do_sample": True}),
        ("llama", None, {"prefill_chunk_size": 5}),
        ("mistral", 5, {}),  # the cache is as long as the window, which the prompt outgrows
        ("mistral", 16, {}),  # here the text does
        ("mistral", 16, {"prefill_chunk_size": 5}),
        ("gemma2", 5, {}),
    ],
)
def test_generate_with_a_static_cache_reads_no_mask(
    seen: list[dict[str, Any]], name: str, window: int | None, options: dict[str, Any]
) -> None:
    """`generate` makes the masks of a batch, copies them and hands them on: what they say has to survive that."""
    changes = {} if window is None else {"sliding_window": window}
    stock, model = zoo.made(name, **changes), lz.patch(zoo.made(name, **changes))
    torch.manual_seed(5)
    want = zoo.generated(stock, zoo.inputs(stock), cache_implementation="static", **options)
    seen.clear()
    torch.manual_seed(5)
    assert torch.equal(zoo.generated(model, zoo.inputs(model), cache_implementation="static", **options), want)
    assert seen and all(call["mask"] is None for call in seen)
    sizes = [(call["q"], call["k"]) for call in seen if name != "gemma2"]  # of every third layer there
    places = range(13, 22)  # as far as it is filled
    prompt = [(5, 5), (5, 10), (2, 12)] if "prefill_chunk_size" in options else [(12, 12)]
    steps = [(1, min(count, window or count)) for count in places]
    assert not sizes or sizes == [size for size in prompt + steps for _ in range(3)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("side", ["left", "middle"])
def test_generate_with_a_static_cache_keeps_the_mask_where_tokens_are_hidden(
    seen: list[dict[str, Any]], name: str, side: str
) -> None:
    stock, model = zoo.made(name), lz.patch(zoo.made(name))
    given = zoo.inputs(stock, "left")
    if side == "middle":
        given["attention_mask"][1] = 1
        given["attention_mask"][1, 5:7] = 0
    want = zoo.generated(stock, given, cache_implementation="static")
    seen.clear()
    assert torch.equal(zoo.generated(model, given, cache_implementation="static"), want)
    assert seen and all(call["mask"] is not None for call in seen)


def test_a_prompt_over_a_static_cache_is_causal_where_transformers_makes_its_mask(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions skip no mask that is longer than the prompt."""
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *args: False)
    model = with_layerzero("llama")
    zoo.generated(model, zoo.inputs(model), max_new_tokens=2, min_new_tokens=2, cache_implementation="static")
    calls = [(call["mask"], call["causal"], call["q"], call["k"]) for call in seen]
    assert calls == [(None, "bottom_right", 12, 12)] * 3 + [(None, False, 1, 13)] * 3


def test_a_mask_over_a_cache_as_long_as_a_window_says_so_only_where_it_is_the_window_alone() -> None:
    from transformers import masking_utils as theirs

    config = zoo.made("mistral").config
    window, causal = theirs.sliding_window_causal_mask_function(5), theirs.causal_mask_function
    packed = theirs.packed_sequence_mask_function(torch.zeros(2, 16, dtype=torch.long))
    chunks = theirs.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long))

    def used(function: Any, start: Any = 3, keys: int = 5, first: int = 0, size: int | None = 5) -> int | None:
        made = attending.mask(
            2, 1, keys, start, first, config=config, mask_function=function, local_size=size,
            allow_is_causal_skip=False,
        )  # fmt: skip
        assert made is not None
        note = attending.noted(made.contiguous())
        assert note is None or (note.window is None and note.used == made[1, 0, 0].sum())
        return None if note is None else int(note.used)

    assert used(window) == 4 and used(window, 7, 5, 3) == 5
    assert used(window, 1, 5) == 2
    assert used(causal, torch.tensor(3), 16, size=None) == 4 and used(causal, 0, 16, size=None) == 1
    others = [theirs.and_masks(window, packed), theirs.or_masks(window, packed), chunks, causal]
    others.append(theirs.sliding_window_causal_mask_function(4))
    assert [used(function) for function in others] == [None] * 5
    assert used(window, 7, 16) is None and used(window, torch.tensor(7), 16) is None  # the first keys are hidden
    assert used(theirs.and_masks(causal, packed), torch.tensor(3), 16, size=None) is None


@pytest.mark.parametrize(("places", "page"), [(21, 1), (24, 8), (128, 128)])
def test_a_static_cache_of_any_length_is_read_by_the_kernel_of_its_pages(
    monkeypatch: pytest.MonkeyPatch, places: int, page: int
) -> None:
    """`generate` makes one for the tokens that it was asked for."""
    sizes: list[int] = []
    real = attending.paged_attention
    monkeypatch.setattr(
        attending, "paged_attention", lambda q, k, *a, **kw: (sizes.append(k.shape[2]), real(q, k, *a, **kw))[1]
    )
    monkeypatch.setattr(attending, "KERNEL", "reference")
    monkeypatch.setattr(attending, "present", lambda: True)
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 1, 16, generator=draw)
    key, value = (torch.randn(2, 2, places, 16, generator=draw) for _ in range(2))
    found = attending.decode(query, key, value, attending.Note(used=torch.tensor(13)), None, None)
    assert found is not None and sizes == [page]
    want = lz.attention(query, key[:, :, :13], value[:, :, :13], backend="reference")
    torch.testing.assert_close(found, want.transpose(1, 2))


def test_a_static_cache_seen_as_pages_says_how_far_it_is_filled() -> None:
    """To the reference too, which a kernel's first answer is held against: the lengths are those of the device."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 1, 16, generator=draw)
    key, value = (torch.randn(2, 2, 64, 16, generator=draw) for _ in range(2))
    batch = attending._batch(torch.tensor(23), 2, 2, 64, 32, key.device)
    pages = [attending._pages(item, 32) for item in (key, value)]
    found = lz.paged_attention(query[:, :, 0], *pages, batch, layout="HND", backend="reference")
    want = lz.attention(query, key[:, :, :23], value[:, :, :23], backend="reference")
    torch.testing.assert_close(found, want[:, :, 0])


def test_a_mask_over_a_static_cache_is_read_by_nobody_until_an_attention_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled forward never asks: reading whether a token is hidden would make each of its steps wait."""
    config = zoo.made("llama").config
    reads: list[Any] = []
    real = attending._padded
    monkeypatch.setattr(attending, "_padded", lambda found: reads.append(found) or real(found))
    for hidden in (False, True):
        tokens = torch.ones(2, 6, dtype=torch.long)
        tokens[0, 0] = not hidden
        mask = attending.mask(
            2, 1, 9, torch.tensor(5), 0, config=config, attention_mask=tokens, allow_is_causal_skip=False
        )
        assert mask is not None and reads == []
        note = attending.noted(mask)
        assert (note is None) is hidden and len(reads) == 1
        assert attending.noted(mask) is note and len(reads) == 1  # all layers share it
        assert note is None or int(note.used) == 6
        reads.clear()


def test_a_mask_that_was_changed_has_lost_its_note() -> None:
    config = zoo.made("llama").config
    mask = attending.mask(1, 4, 9, 5, 0, config=config)
    assert mask is not None and attending.noted(mask) == attending.Note("bottom_right")
    assert mask[0, 0].tolist() == [[k <= q + 5 for k in range(9)] for q in range(4)]  # true word for word
    assert attending.noted(mask & True) is None and attending.noted(mask[..., :8]) is None
    assert attending.noted(None) is None


def test_chunked_attention_keeps_its_mask() -> None:
    """Llama 4's chunk size comes under the same name as a window."""
    from transformers import LlamaConfig

    config = LlamaConfig(attention_chunk_size=4)
    from transformers.masking_utils import chunked_causal_mask_function

    function = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = attending.mask(1, 6, 6, 0, 0, config=config, local_size=4, mask_function=function)
    assert mask is not None and attending.noted(mask) is None
    assert mask[0, 0, 5].tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("side", [None, "left"])
def test_attention_sinks_take_their_share(side: str | None) -> None:
    """gpt-oss has learned sinks; ignoring them would change its logits."""
    import transformers as t

    config = t.GptOssConfig(
        vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
        max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.GptOssForCausalLM(config).eval()
    from layerzero_verify.models import _lively

    _lively(model, "gpt_oss", 0)
    given = zoo.inputs(model, side)
    want, tokens = zoo.logits(model, given), zoo.generated(model, given)
    lz.patch(model)
    assert (zoo.logits(model, given) - want).abs().max().item() < LOGITS / 10
    assert torch.equal(zoo.generated(model, given), tokens)
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "layerzero"


def _sized(name: str, kind: str, **fields: Any) -> Any:
    """A tiny model of transformers by its prefix and the rest of its name, with lively weights."""
    import transformers as t

    torch.manual_seed(0)
    model = getattr(t, name + kind)(getattr(t, f"{name}Config")(**fields)).eval()
    zoo.models._lively(model, name, 0)
    return model


_LATENT: dict[str, Any] = {
    **zoo.SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 4,
}  # fmt: skip


def test_keys_that_an_indexer_did_not_choose_are_hidden() -> None:
    """Models ask for that with words of their own, under every name of an attention but transformers' own two."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 4, count, 16, generator=draw) for count in (5, 9, 9))
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4).expand(2, 1, -1, -1)
    keys = torch.rand(2, 5, 9, generator=draw).topk(4).indices.int()
    seen = torch.zeros(2, 5, 9, dtype=torch.bool).scatter(-1, keys.long(), True)[:, None] & causal
    seen[..., 0] = causal[..., 0]  # no row without any key
    keys = torch.cat((keys, torch.zeros(2, 5, 1, dtype=torch.int32)), -1)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2)
    floats = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (causal, floats):
        found, _ = attending.attend(torch.nn.Module(), query, key, value, mask, indices=keys)
        torch.testing.assert_close(found, want)

    def build(blocks: Any, mask: Any, count: int, dtype: torch.dtype, device: Any, positions: torch.Tensor) -> Any:
        assert (blocks, mask, count, positions.tolist()) == ("blocks", None, 9, [[4, 5, 6, 7, 8]])
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    module: Any = torch.nn.Module()
    module.indexer = SimpleNamespace(build_block_mask=build)
    words: Any = {"block_indices": "blocks"}
    found, _ = attending.attend(module, query, key, value, None, **words)
    torch.testing.assert_close(found, want)


def test_models_with_an_indexer_give_the_logits_they_give_unpatched() -> None:
    """Such as DeepSeek 3.2, as far as this version of transformers has them."""
    import transformers as t

    for name in ("DeepseekV32", "GlmMoeDsa", "HYV4"):
        if not hasattr(t, f"{name}ForCausalLM"):
            continue
        model = _sized(name, "ForCausalLM", **_LATENT)
        for side in (None, "left"):
            given = zoo.inputs(model, side)
            want, tokens = zoo.logits(model, given), zoo.generated(model, given)
            lz.patch(model)
            assert (zoo.logits(model, given) - want).abs().max().item() < LOGITS / 10, name
            assert torch.equal(zoo.generated(model, given), tokens), name
            lz.unpatch(model)


_BART: dict[str, Any] = {
    "vocab_size": zoo.VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 128,
}  # fmt: skip
_GIT = {**zoo.SMALL, "vision_config": {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}}


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("Git", "ForCausalLM", _GIT),
        ("NllbMoe", "ForConditionalGeneration", {**_BART, "num_experts": 4, "expert_capacity": 64}),
        ("PegasusX", "ForConditionalGeneration", {**_BART, "block_size": 4, "num_global_tokens": 2}),
        ("Splinter", "Model", {**zoo.SMALL, "question_token_id": 3}),
    ],
)
def test_models_that_know_eager_attention_only_get_its_masks(name: str, kind: str, fields: dict[str, Any]) -> None:
    """They add them to scores, or do not say what is causal: a mask of another form would be wrong without a word."""
    lz.enable_transformers()
    model = _sized(name, kind, **fields)

    def numbers(given: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**given)[0]
        return found[given["attention_mask"].bool()] if kind != "ForConditionalGeneration" and len(given) > 1 else found

    for side in (None, "left"):
        given = zoo.inputs(model, side)
        want = numbers(given)
        model.set_attn_implementation("layerzero")
        assert (numbers(given) - want).abs().max().item() < LOGITS / 10
        model.set_attn_implementation("eager")
    made = torch.compile(attending.mask, fullgraph=True, backend="eager")(1, 3, 3, config=model.config)
    assert made is not None and made.tolist()[0][0][0] == [0.0, *[torch.finfo(torch.float32).min] * 2]


def test_the_report_names_the_parts_whose_attention_it_is() -> None:
    """Not by their names: the text side of GIT computes its own, and a class may be called anything."""
    report = lz.patched(lz.patch(_sized("Git", "ForCausalLM", **_GIT)))
    assert report is not None
    assert [item.kind for item in report.patched if item.op == "attention"] == ["GitVisionAttention"]

    model = zoo.made("llama")
    attention = model.model.layers[0].self_attn
    own = type(attention)
    attention.__class__ = type("Latent", (own,), {"forward": lambda *a, **k: own.forward(*a, **k)})
    report = lz.patched(lz.patch(model))
    assert report is not None
    kinds = [item.kind for item in report.patched if item.op == "attention"]
    assert kinds == ["Latent", "LlamaAttention", "LlamaAttention"]


def test_experts_of_deepseek_v3_are_routed() -> None:
    """Shared experts, groups of experts, sigmoid scores with a correction bias: what is routed is the experts' work."""
    import transformers as t

    from layerzero_verify.models import _lively

    config = t.DeepseekV3Config(
        vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.DeepseekV3ForCausalLM(config).eval()
    _lively(model, "deepseek_v3", 0)
    given = zoo.inputs(model)
    want, tokens = zoo.logits(model, given), zoo.generated(model, given)
    lz.patch(model)
    assert model.model.layers[1].mlp.experts.config._experts_implementation == "layerzero"
    assert (zoo.logits(model, given) - want).abs().max().item() < LOGITS / 10
    assert torch.equal(zoo.generated(model, given), tokens)


def test_experts_by_name_that_no_op_computes_go_transformers_default_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gate that no op has; the path that copies every token's weights is never taken."""
    import transformers as t
    from transformers.integrations import moe

    from layerzero_models.transformers import enabling

    monkeypatch.setattr(enabling, "_left", set())
    ways: list[str] = []
    for name in ("grouped_mm_experts_forward", "batched_mm_experts_forward"):
        own = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *args, name=name, own=own: (ways.append(name), own(*args))[1])
    config = t.GptOssConfig(
        vocab_size=zoo.VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
        max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.GptOssForCausalLM(config).eval()
    kind = type(model.model.layers[0].mlp.experts)
    own_gate = kind._apply_gate
    monkeypatch.setattr(kind, "_apply_gate", lambda self, both: own_gate(self, both) * 0.5)
    given = zoo.inputs(model)
    want, tokens = zoo.logits(model, given), zoo.generated(model, given)
    lz.enable_transformers()
    model.set_experts_implementation("layerzero")
    ways.clear()
    assert (zoo.logits(model, given) - want).abs().max().item() < LOGITS / 10
    assert torch.equal(zoo.generated(model, given), tokens)
    assert set(ways) == {"grouped_mm_experts_forward"}
    said = [record.getMessage() for record in caplog.records if record.name == "layerzero.transformers"]
    assert len(said) == 1 and "it has a gate of its own" in said[0]


def test_decoding_does_not_exchange_experts_by_name_for_products_that_copy_weights() -> None:
    """transformers does so with its default on any device but a CPU; nothing is computed here."""
    model = zoo.made("mixtral", num_hidden_layers=1).to("meta")

    def chosen() -> set[str]:
        return {item for item in model.get_experts_implementation().values() if item is not None}

    model.set_experts_implementation("grouped_mm")
    with model._optimize_model_for_decode():
        assert "batched_mm" in chosen()
    lz.enable_transformers()
    model.set_experts_implementation("layerzero")
    with model._optimize_model_for_decode():
        assert "layerzero" in chosen() and "batched_mm" not in chosen()


@pytest.fixture
def bart() -> Any:
    return zoo.made("bart", max_position_embeddings=2048)


@pytest.mark.req("R-OP-08")
@pytest.mark.parametrize("length", [128, 512, 2048])
def test_cross_attention_over_long_padded_encodings_with_and_without_a_cache(bart: Any, length: int) -> None:
    """Encoder and decoder keep caches of their own; rows of the batch are padded to different lengths."""
    from transformers import DynamicCache, EncoderDecoderCache

    ids = zoo.tokens(3, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    mask[2, 5:] = 0
    target = zoo.tokens(3, 4, seed=3)

    def both(model: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        with torch.no_grad():
            encoded = model.get_encoder()(ids, attention_mask=mask)
            whole = model(
                encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=target, use_cache=False
            ).logits
            cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
            steps = [
                model(
                    encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=target[:, i : i + 1],
                    past_key_values=cache, use_cache=True,
                ).logits
                for i in range(4)
            ]  # fmt: skip
        return whole, torch.cat(steps, 1), cache

    want, want_steps, _ = both(bart)
    got, got_steps, cache = both(lz.patch(bart))
    for found, expected in ((got, want), (got_steps, want_steps), (got_steps, want)):
        assert (found - expected).abs().max().item() < LOGITS / 10
    assert cache.self_attention_cache.get_seq_length() == 4
    assert cache.cross_attention_cache.get_seq_length() == length
