"""Text in, text out: through ops that are selected and explained, streamed without breaking a character."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world
from layerzero.model.dispatch_table import PlanEntry, bucket_sizes, situation
from layerzero.runtime.state import state
from layerzero.tables.file import hardware_of, make_table, save_table
from layerzero_tokenizers import TextStream, TinyTransformer, generate
from layerzero_tokenizers.pipeline import stream

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
PROMPT = "You are a helpful assistant. Answer the question of the user as well as you can, step by step. " * 8


def streamed(handle, ids, skip):
    text = TextStream(handle, skip_special_tokens=skip)
    parts = [text.push(token) for token in ids]
    return [*parts, text.flush()]


@pytest.mark.req("R-TOK-09", "R-TOK-10")
@pytest.mark.parametrize("name", ["gpt2", "cl100k", "sp_bytes"])
def test_a_prompt_goes_all_the_way_and_back(name, opened):
    handle = opened(name)
    model = TinyTransformer(handle.vocab_size)
    first = generate("The quick brown fox", handle, model, max_new_tokens=24)
    assert len(first.ids) == 24 and first == generate("The quick brown fox", handle, model, max_new_tokens=24)
    assert first.text == lz.detokenize(first.ids, handle, skip_special_tokens=True)
    assert first.prompt_ids == handle.engines[handle.home].encode("The quick brown fox", True, True)
    assert generate("The quick brown fox", handle, model, seed=1, max_new_tokens=24).ids != first.ids


@pytest.mark.req("R-TOK-10")
def test_the_same_text_comes_from_plain_torch(opened):
    """An independent forward pass over all tokens at once names the same greedy tokens."""
    handle = opened("gpt2")
    model = TinyTransformer(handle.vocab_size, layers=1)
    made = generate("the lazy dog", handle, model, max_new_tokens=6, top_k=1)
    ids = list(made.prompt_ids)
    layer = model.layers[0]

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    for _ in range(6):
        x = model.embed[torch.tensor([ids])]
        mixed = (norm(x) @ layer["qkv"].T).view(1, len(ids), -1, model.head_dim).transpose(1, 2)
        query, key, value = mixed.split((4, 2, 2), dim=1)
        half = model.head_dim // 2
        cos, sin = model.cos[: len(ids)], model.sin[: len(ids)]

        def turn(t, cos=cos, sin=sin, half=half):
            a, b = t[..., :half], t[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        key, value = (t.repeat_interleave(2, dim=1) for t in (turn(key), value))
        attended = torch.nn.functional.scaled_dot_product_attention(turn(query), key, value, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(1, len(ids), -1) @ layer["out"].T
        gate, up = (norm(x) @ layer["gate_up"].T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["down"].T
        ids.append(int((norm(x[:, -1]) @ model.head.T).argmax()))
    assert ids[len(made.prompt_ids) :] == made.ids


@pytest.mark.req("R-TOK-10", "R-TOK-08")
def test_caches_and_disabled_selection_do_not_change_the_text(opened):
    handle = opened("gpt2").within("pipeline")
    model = TinyTransformer(handle.vocab_size, length=1024)
    prompts = [f"{PROMPT}Question {index}?" for index in range(3)]
    cached = [generate(text, handle, model, max_new_tokens=6) for text in prompts]
    with lz.disabled():
        plain = [generate(text, opened("gpt2").within("fresh"), model, max_new_tokens=6) for text in prompts]
    assert [item.prompt_ids for item in cached] == [item.prompt_ids for item in plain]
    again = [generate(text, handle, model, max_new_tokens=6) for text in prompts]
    assert cached == again


@pytest.mark.req("R-TOK-10")
def test_a_dispatch_table_serves_the_pipeline_of_its_own_tokenizer_alone(opened, tmp_path):
    """A decision made beforehand is followed, the text stays the same; another tokenizer is none of its business."""
    handle, other, slower = opened("gpt2"), opened("llama3"), "tokenizers.tokenize.fast"
    model = TinyTransformer(handle.vocab_size)
    wanted = generate("the dog", handle, model, max_new_tokens=5)
    ctx, world = lz.select("tokenize", "the dog", handle).context, current_world()
    table = make_table(
        hardware=hardware_of(probe_device("cpu")), policy_hash=world.policy.policy_hash, buckets={"tokenize": {}},
        kernels={slower: world.registry.get(slower).version},
        entries=(PlanEntry("tokenize", situation(ctx), bucket_sizes(ctx, {}), slower, 12.5, 0.0),),
    )  # fmt: skip
    path = tmp_path / "dispatch_table.json"
    save_table(table, path)
    lz.use_table(path)
    try:
        followed, selected = (lz.explain("tokenize", "the dog", item) for item in (handle, other))
        assert followed.chosen == slower and "PLAN_FOLLOWED" in str([r.code.value for r in followed.decision.notes] + [
            r.code.value for r in followed.decision.candidate(slower).reasons
        ])  # fmt: skip
        assert "PLAN_FOLLOWED" not in [r.code.value for r in selected.decision.candidate(slower).reasons]
        assert generate("the dog", handle, model, max_new_tokens=5) == wanted
    finally:
        lz.use_table(None)


def test_the_example_runs(capsys):
    runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "text_generation.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "the same ids" in said and "chosen: " in said and "What is 6 times 7?" in said and "1 hits" in said


def test_the_demo_shows_text_in_and_text_out():
    from layerzero_tune.cli.demo import text_lines, text_round_trip

    found = text_round_trip()
    assert found is not None and found["round_trip"] and len(found["ids"]) == 12
    assert "comes back unchanged" in " ".join(" ".join(text_lines(found)).split())
    with lz.scoped(deny=["*"]):
        assert "error" in text_round_trip()


def test_a_decode_loop_stays_hot(opened):
    handle = opened("gpt2")
    model = TinyTransformer(handle.vocab_size)
    generate("the dog", handle, model, max_new_tokens=10)
    before = state.counters.selections
    generate("the dog", handle, model, max_new_tokens=10)
    assert state.counters.selections == before


def test_a_stream_ends_at_the_end_token(opened):
    handle = opened("cl100k")
    model = TinyTransformer(handle.vocab_size)
    model.head.zero_()
    model.head[handle.eos_id] = 100.0
    model.norm.fill_(1.0)
    pairs = list(stream("a", handle, model, max_new_tokens=8, temperature=0.0))
    assert all(token != handle.eos_id for token, _ in pairs)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "bert", "unigram", "cl100k", "sp_bpe", "sp_bytes", "sp_unigram"])
def test_pieces_put_together_are_the_text_and_no_piece_breaks_a_character(name, opened):
    handle = opened(name)

    @settings(max_examples=400 if PROVE else 25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.text(st.sampled_from("ab the.,'!é\u0301日本😀👨\u200d👩🏽 \n<|>s"), max_size=40), st.booleans())
    def run(text, skip):
        ids = lz.tokenize(text, handle)
        parts = streamed(handle, ids, skip)
        assert "".join(parts) == lz.detokenize(ids, handle, skip_special_tokens=skip)
        assert all("\ufffd" not in part for part in parts)

    run()


def test_an_emoji_comes_whole_and_as_soon_as_it_can(opened):
    handle = opened("cl100k")
    ids = lz.tokenize("a 🦄 b", handle)
    parts = streamed(handle, ids, True)
    assert [part for part in parts if part][:1] == ["a"] and "".join(parts) == "a 🦄 b"
    assert any("🦄" in part for part in parts[:-1])


@pytest.mark.parametrize("name", ["gpt2", "cl100k"])
def test_bytes_that_never_become_text_do_not_stop_the_stream(name, opened):
    handle = opened(name)
    bad = lz.tokenize("\U0001f984", handle)[0]  # the first byte of an emoji, again and again
    ids = [bad] * 40 + lz.tokenize(" ok 🦄", handle, add_special_tokens=False)
    parts = streamed(handle, ids, True)
    assert "".join(parts) == lz.detokenize(ids, handle)
    assert parts[-1] == "" and any(parts[:40])
