"""Writing and reading vLLM's KV cache with our ops, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from layerzero_vllm import attend
from layerzero_vllm.choice import LayerKind, Phase

KIND = LayerKind("cpu", "float32", 4, 2, 32, 16)


def expected(drawn, settings, sequences, causal=True):
    """Attention of each sequence's last tokens over all of its tokens, masked, in float64."""
    found = []
    tokens, new = len(drawn.keys) // sequences, len(drawn.query) // sequences
    for row in range(sequences):
        keys, values = (part[row * tokens : (row + 1) * tokens].double() for part in (drawn.keys, drawn.values))
        query = drawn.query[row * new : (row + 1) * new].double()
        keys, values = (part.repeat_interleave(2, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * settings.scale
        if settings.softcap:
            scores = settings.softcap * torch.tanh(scores / settings.softcap)
        behind = torch.arange(tokens - new, tokens)[:, None] - torch.arange(tokens)
        if settings.alibi_slopes is not None:
            scores = scores - settings.alibi_slopes.double()[:, None, None] * behind
        hidden = ((behind < 0) & causal) | (behind >= (settings.window or tokens))
        scores = scores.masked_fill(hidden, -torch.inf)
        if settings.sinks is not None:  # one more key of each head, without a value
            sinks = settings.sinks.double()[:, None, None].expand(-1, new, 1)
            scores = torch.cat([scores, sinks], dim=-1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(found)


@pytest.mark.parametrize(
    "settings",
    [
        attend.Settings(0.5),
        attend.Settings(0.5, window=7),
        attend.Settings(0.5, softcap=5.0),
        attend.Settings(0.5, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
        attend.Settings(0.5, sinks=torch.tensor([0.0, 1.0, 3.0, -2.0])),
    ],
    ids=["plain", "window", "softcap", "alibi", "sinks"],
)
@pytest.mark.parametrize(
    "phase", [Phase("decode", 3, 1, 40), Phase("prefill", 2, 21, 21), Phase("chunked prefill", 2, 5, 37)], ids=str
)
def test_a_step_attends_to_what_was_written(phase, settings):
    drawn = attend.example(KIND, phase, torch.float32)
    before = torch.ones(len(drawn.keys), dtype=torch.bool)
    before[drawn.new] = False
    for part in (before.nonzero().squeeze(1), drawn.new):  # earlier steps, then this one
        attend.write(drawn.keys[part], drawn.values[part], drawn.cache, drawn.slots[part])
    batch = attend.batch_of(drawn.block_table, drawn.seq_lens, drawn.query_start_loc)
    assert batch.is_decode == (phase.query == 1)
    found = attend.attend(drawn.query, attend.halves(drawn.cache), batch, settings)
    torch.testing.assert_close(found.double(), expected(drawn, settings, phase.batch), rtol=1e-5, atol=1e-5)


def test_an_encoder_sees_the_tokens_behind_a_query_too():
    phase, settings = Phase("prefill", 2, 21, 21), attend.Settings(0.5)
    drawn = attend.example(KIND, phase, torch.float32)
    attend.write(drawn.keys, drawn.values, drawn.cache, drawn.slots)
    batch = attend.batch_of(drawn.block_table, drawn.seq_lens, drawn.query_start_loc)
    found = attend.attend(drawn.query, attend.halves(drawn.cache), batch, settings, causal=False)
    wanted = expected(drawn, settings, phase.batch, causal=False)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_both_packings_hold_the_same_tokens():
    drawn = attend.example(KIND, Phase("decode", 1, 1, 20), torch.float32)
    attend.write(drawn.keys, drawn.values, drawn.cache, drawn.slots)
    keys, values = attend.halves(drawn.cache)
    wide = torch.cat([keys, values], dim=-1)
    for one, other in zip(attend.interleaved(wide), (keys, values), strict=True):
        assert torch.equal(one, other)


def test_padding_and_tokens_beyond_the_slots_are_not_written():
    cache = torch.zeros(2, 2, 16, 64)
    key = torch.ones(4, 2, 32)
    attend.write(key, 2 * key, cache, torch.tensor([3, -1, 17]))
    keys, values = attend.halves(cache)
    assert keys[0, :, 3].eq(1).all() and values[1, :, 1].eq(2).all()
    assert keys.count_nonzero() == values.count_nonzero() == 2 * 2 * 32


def test_a_new_step_may_bring_other_slots_in_the_same_tensor():
    cache, slots = torch.zeros(2, 2, 16, 64), torch.tensor([3])
    for slot in (3, 20):
        slots[0] = slot
        attend.forget()
        attend.write(torch.full((1, 2, 32), slot + 1.0), torch.zeros(1, 2, 32), cache, slots)
    keys, _ = attend.halves(cache)
    assert (keys[0, 0, 3, 0], keys[1, 1, 4, 0]) == (4, 21)


def test_results_that_differ_or_are_not_finite_disagree():
    one = torch.randn(3, 4)
    assert attend.agrees(one, one + 1e-6)
    assert not attend.agrees(one, one + 1e-2) and not attend.agrees(one * torch.nan, one * torch.nan)


def test_a_race_times_every_way():
    found = attend.race({"one": [lambda: None], "two": [lambda: sum(range(20_000))]}, seconds=0.0)
    assert 0 < found["one"] < found["two"]


def test_a_race_goes_round_all_layers_in_turns():
    made = []
    ways = {side: [lambda at=(side, layer): made.append(at) for layer in range(3)] for side in ("one", "two")}
    assert set(attend.race(ways, seconds=0.0)) == {"one", "two"}
    assert made[:6] == [("one", 0), ("two", 0), ("one", 1), ("two", 1), ("one", 2), ("two", 2)]
    assert len(made) % 6 == 0
