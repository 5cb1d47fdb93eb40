"""Draft and target in one loop: the target's text, two models' selections apart, and what it costs."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.errors import ConfigurationError, InvalidInputError
from layerzero.model.kernel import Limit
from layerzero.tuning.truth import UNLIKELY, chi_square
from layerzero_models import plugin
from layerzero_models.speculative import SpeculativeConfig, SpeculativeDecoder, decode
from layerzero_models.speculative.decoder import Clock, compare
from layerzero_models.speculative.tree import TreeDecoder, tree_of
from layerzero_verify.testing.run import counts_of

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Tiny(nn.Module):
    """A small Llama on LayerZero's ops, with a KV cache of fixed room. What is stale in the cache is spoilt at each
    call, so that a loop which read it would not go unnoticed."""

    def __init__(self, seed, *, rows, vocab=12, hidden=16, heads=4, kv_heads=2, layers=1, room=40, sharpness=3.0):
        super().__init__()
        generator = seeded(seed)
        dim = hidden // heads

        def weight(*shape, scale=1.0):
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1]))

        self.embed = weight(vocab, hidden, scale=4.0)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            parts = {
                "qkv": weight((heads + 2 * kv_heads) * dim, hidden),
                "out": weight(hidden, heads * dim),
                "up": weight(4 * hidden, hidden),
                "down": weight(hidden, 2 * hidden),
                "norm1": nn.Parameter(torch.ones(hidden)),
                "norm2": nn.Parameter(torch.ones(hidden)),
            }
            self.layers.append(nn.ParameterDict(parts))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = weight(vocab, hidden, scale=sharpness)
        self.sizes, self.room, self.fed = (heads, kv_heads, dim), room, []
        angles = torch.arange(float(room))[:, None] * torch.logspace(0, -2, dim // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.cache = [torch.zeros(2, rows, kv_heads, room, dim) for _ in range(layers)]

    def forward(self, ids, lengths):
        return self.tree(ids, lengths, torch.arange(-1, ids.shape[1] - 1))

    def tree(self, ids, lengths, parents):
        self.fed.append(tuple(ids.shape))
        heads, kv_heads, dim = self.sizes
        batch, size = ids.shape
        positions, mask = lz.tree_positions(parents, lengths), lz.tree_mask(parents, lengths, capacity=self.room)
        slots = (lengths[:, None] + torch.arange(size))[:, None, :, None].expand(-1, kv_heads, -1, dim)
        stale = torch.arange(self.room) >= lengths[:, None]
        x = lz.embedding(ids, self.embed)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            cache.masked_fill_(stale[None, :, None, :, None], 77.0)
            qkv = lz.linear(lz.rms_norm(x, layer["norm1"]), layer["qkv"]).view(batch, size, -1, dim).transpose(1, 2)
            query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
            query, key = lz.rope(query, key, self.cos, self.sin, position_ids=positions)
            cache[0].scatter_(2, slots, key)
            cache[1].scatter_(2, slots, value)
            seen = lz.attention(query, cache[0], cache[1], attn_mask=mask).transpose(1, 2).flatten(2)
            x = x + lz.linear(seen, layer["out"])
            x = x + lz.linear(lz.silu_and_mul(lz.linear(lz.rms_norm(x, layer["norm2"]), layer["up"])), layer["down"])
        return lz.linear(lz.rms_norm(x, self.norm), self.head)

    def keep(self, lengths, path):
        place = lengths[:, None] + torch.arange(path.shape[1])
        origin = torch.where(path >= 0, lengths[:, None] + path, place)
        for cache in self.cache:
            spread = [
                index[None, :, None, :, None].expand(2, -1, cache.shape[2], -1, cache.shape[4])
                for index in (place, origin)
            ]
            cache.scatter_(3, spread[0], cache.gather(3, spread[1]))


def blurred(model, amount, seed=5):
    """A draft that thinks nearly as the model does."""
    generator = seeded(seed)
    sizes = {"vocab": model.embed.shape[0], "room": model.room, "layers": len(model.layers)}
    copy = Tiny(0, rows=model.cache[0].shape[1], **sizes)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in copy.parameters():
            weight += torch.randn(weight.shape, generator=generator) * amount
    return copy


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9], [2, 6, 5], [0, 0, 11]])


def pair(amount, rows=4, **sizes):
    target = Tiny(1, rows=rows, **sizes)
    return blurred(target, amount), target


# -- the text ----------------------------------------------------------------------------------------
def test_the_models_cache_is_right():
    """Fed whole or in pieces, after a roll-back or not: the same logits."""
    model, lengths = Tiny(1, rows=4, layers=2), torch.zeros(4, dtype=torch.int64)
    ids = torch.randint(12, (4, 9), generator=seeded())
    whole = model(ids, lengths)
    model(ids[:, :5], lengths)
    model(ids[:, :4] * 0, lengths + 5)  # a wrong guess, rolled back
    parts = torch.cat((model(ids[:, 5:7], lengths + 5), model(ids[:, 7:], lengths + 7)), dim=1)
    torch.testing.assert_close(parts, whole[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.req("R-SPEC-04")
@pytest.mark.parametrize(("amount", "low", "high"), [(0.0, 1.0, 1.0), (0.01, 0.6, 1.0), (3.0, 0.0, 0.4)])
@pytest.mark.parametrize("length", [1, 4])
def test_greedy_text_is_the_targets_own(length, amount, low, high):
    draft, target = pair(amount, layers=2)
    made = SpeculativeDecoder(draft, target, SpeculativeConfig(draft_len=length, temperature=0.0)).generate(PROMPT, 14)
    alone = decode(target, PROMPT, 14, SpeculativeConfig(temperature=0.0))
    assert torch.equal(made.tokens, alone)
    assert low <= made.stats.acceptance_rate <= high
    assert made.stats.emitted == 56
    if amount == 0.0:
        assert made.stats.rounds == -(-14 // (length + 1)), "a perfect draft fills every round"


@pytest.mark.req("R-SPEC-03", "R-SPEC-04")
@pytest.mark.parametrize("amount", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("widths", [(1, 1), (3, 2, 1), (20, 1)])
def test_greedy_text_of_a_tree_is_the_targets_own(widths, amount):
    draft, target = pair(amount, room=60)
    made = TreeDecoder(draft, target, widths, SpeculativeConfig(temperature=0.0)).generate(PROMPT, 10)
    assert torch.equal(made.tokens, decode(target, PROMPT, 10, SpeculativeConfig(temperature=0.0)))
    assert max(shape[1] for shape in target.fed) == len(tree_of(widths)) + 1, "the whole tree is verified at once"
    if amount == 0.0:
        assert made.stats.rounds == -(-10 // (len(widths) + 1))


def test_more_children_for_one_place_are_kept_more_often():
    rounds = []
    for widths in ((1,), (4,)):
        draft, target = pair(0.5)
        rounds.append(TreeDecoder(draft, target, widths, SpeculativeConfig(temperature=0.0)).generate(PROMPT, 24))
    assert rounds[1].stats.rounds < rounds[0].stats.rounds


def law(target, prompt, length, config):
    """The probability of every text of a length, by running the target on all of them."""
    vocab = target.embed.shape[0]
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    model = Tiny(0, rows=len(texts), vocab=vocab, room=12)
    model.load_state_dict(target.state_dict())
    ids = torch.cat((prompt.expand(len(texts), -1), texts), dim=1)
    logits = model(ids, torch.zeros(len(texts), dtype=torch.int64))[:, prompt.shape[1] - 1 : -1]
    return config.probs(logits).double().gather(2, texts[..., None]).squeeze(-1).prod(dim=1)


SETTINGS = {"plain": {}, "filtered": {"temperature": 0.8, "top_k": 4, "top_p": 0.9}}


@pytest.mark.req("R-SPEC-04")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("amount", "low", "high"), [(0.02, 0.7, 1.0), (3.0, 0.0, 0.5)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drawn_texts_follow_the_target(shape, amount, low, high, settings):
    rows = 40_000 if PROVE else 3_000
    draft, target = pair(amount, rows=rows, vocab=5, room=12)
    config = SpeculativeConfig(draft_len=2, **SETTINGS[settings])
    decoder = (
        SpeculativeDecoder(draft, target, config) if shape == "chain" else TreeDecoder(draft, target, (2, 1), config)
    )
    prompt = torch.tensor([[2, 4]])
    made = decoder.generate(prompt.expand(rows, -1), 3, generator=seeded(11))
    texts = (made.tokens * torch.tensor([25, 5, 1])).sum(dim=1)
    expected = law(target, prompt, 3, config)
    assert chi_square(counts_of(texts, 125), expected) > UNLIKELY
    assert chi_square(counts_of(made.tokens[:, 0], 5), expected.view(5, 25).sum(dim=1)) > UNLIKELY
    if shape == "chain":
        assert low <= made.stats.acceptance_rate <= high


@pytest.mark.req("R-SPEC-04")
def test_the_law_of_the_draft_is_not_mistaken_for_the_targets():
    rows = 3_000
    draft, target = pair(3.0, rows=rows, vocab=5, room=12)
    tokens = decode(draft, torch.tensor([[2, 4]]).expand(rows, -1), 3, generator=seeded(11))
    texts = (tokens * torch.tensor([25, 5, 1])).sum(dim=1)
    assert chi_square(counts_of(texts, 125), law(target, torch.tensor([[2, 4]]), 3, SpeculativeConfig())) < UNLIKELY


@pytest.mark.req("R-SPEC-04", "R-SAMP-02")
def test_equal_seeds_write_equal_texts():
    config = SpeculativeConfig(draft_len=3, temperature=0.9, top_p=0.9)
    texts = [
        SpeculativeDecoder(*pair(0.3), config).generate(PROMPT, 12, generator=seeded(seed)).tokens for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_a_row_ends_with_its_own_end_token():
    draft, target = pair(0.05)
    alone = decode(target, PROMPT, 20, SpeculativeConfig(temperature=0.0))
    end = int(alone[1, 6])
    config = SpeculativeConfig(draft_len=3, temperature=0.0, eos_id=end)
    made = SpeculativeDecoder(draft, target, config).generate(PROMPT, 20)
    assert torch.equal(made.tokens, decode(target, PROMPT, 20, config))
    for row in range(4):
        text = alone[row].tolist()
        stop = text.index(end) + 1 if end in text else 20
        assert made.tokens[row].tolist() == [*text[:stop], *[-1] * (20 - stop)]


def test_a_prompt_of_one_token():
    draft, target = pair(0.05)
    config = SpeculativeConfig(draft_len=3, temperature=0.0)
    made = SpeculativeDecoder(draft, target, config).generate(PROMPT[:, :1], 12)
    assert torch.equal(made.tokens, decode(target, PROMPT[:, :1], 12, config))


def test_a_broken_draft_costs_time_and_not_the_text():
    target = Tiny(1, rows=4)
    for config in (SpeculativeConfig(temperature=0.0), SpeculativeConfig()):
        decoder = SpeculativeDecoder(lambda ids, lengths: torch.full((*ids.shape, 12), math.nan), target, config)
        made = decoder.generate(PROMPT, 8, generator=seeded())
        assert made.stats.acceptance_rate == 0.0 and (made.tokens >= 0).all()
        if config.greedy:
            assert torch.equal(made.tokens, decode(target, PROMPT, 8, config))


def test_a_target_without_a_distribution_is_refused_by_name():
    draft = Tiny(1, rows=4)

    def broken(ids, lengths):
        return torch.full((*ids.shape, 12), math.nan)

    with pytest.raises(InvalidInputError, match="row 0"):
        SpeculativeDecoder(draft, broken).generate(PROMPT, 8)
    with pytest.raises(InvalidInputError, match="row 0"):
        decode(broken, PROMPT, 8)


# -- selection ---------------------------------------------------------------------------------------
@pytest.fixture
def lab(lab):
    """The laboratory, with the ops of this package."""
    lab.bring(plugin)
    return lab


class Watched:
    """A model that notes which kernels ran while it did."""

    def __init__(self, model, lab):
        self.model, self.lab, self.ran = model, lab, []

    def __call__(self, ids, lengths):
        before = len(self.lab.ran())
        out = self.model(ids, lengths)
        self.ran += self.lab.ran()[before:]
        return out

    def attention(self):
        return {kernel for kernel in self.ran if ".attention." in kernel}


@pytest.mark.req("R-SPEC-01")
def test_draft_target_and_verification_select_apart(lab):
    """The models are equal in every size: calls of one would hit the choices of the other if they shared any."""
    lab.use(lab.kernel("extra.attention.k", priority=99))
    draft, target = (Watched(model, lab) for model in pair(0.05))
    config = SpeculativeConfig(
        temperature=0.8,
        draft={"locks": {"attention": "reference.attention.plain"}, "deny": ["torch.sample.*"]},
        verify={"locks": {"sampling_probs": "reference.sampling_probs.plain"}},
    )
    decoder = SpeculativeDecoder(draft, target, config)
    decoder.generate(PROMPT, 12, generator=seeded())
    assert draft.attention() == {"reference.attention.plain"}
    assert target.attention() == {"extra.attention.k"}
    ran = lab.ran()
    assert "reference.sample.plain" in ran and "torch.sample.sort_free" not in ran, (
        "the draft draws under its own rules"
    )
    assert {"reference.sampling_probs.plain", "torch.sampling_probs.sort_free"} <= set(ran)
    query, key = torch.randn(4, 4, 1, 4), torch.randn(4, 2, 40, 4)
    assert decoder.explain("draft", "attention", query, key, key).chosen == "reference.attention.plain"
    assert decoder.explain("draft", "attention", query, key, key).decision.locked
    for free in ("target", "verify"):
        assert decoder.explain(free, "attention", query, key, key).chosen == "extra.attention.k"
    assert lz.which("attention", query, key, key) == "extra.attention.k", "nothing leaks out of the loop"
    assert decoder.explain("verify", "sampling_probs", torch.randn(2, 9)).decision.locked


@pytest.mark.req("R-SPEC-01")
@pytest.mark.parametrize("denied", [False, True])
def test_the_targets_settings_and_the_verifications_bind_nobody_else(lab, denied):
    fallback = lab.builtin.kernels["reference.attention.plain"].kernel_id
    lab.use(lab.kernel("extra.attention.k", priority=99), lab.kernel("extra.sample_speculative.k", priority=99))
    draft, target = (Watched(model, lab) for model in pair(0.05))
    config = SpeculativeConfig(
        temperature=0.8, target={"locks": {"attention": fallback}}, verify={"deny": ["extra"]} if denied else {}
    )
    SpeculativeDecoder(draft, target, config).generate(PROMPT, 6, generator=seeded())
    assert target.attention() == {fallback} and draft.attention() == {"extra.attention.k"}
    judges = {kernel for kernel in lab.ran() if ".sample_speculative." in kernel}
    assert len(judges) == 1 and (judges == {"extra.sample_speculative.k"}) is not denied


@pytest.mark.req("R-SPEC-01")
def test_a_role_stays_hot_and_follows_what_is_set_around_it(lab):
    from layerzero.runtime.state import state

    lab.use(lab.kernel("extra.attention.k", priority=99))
    draft, target = pair(0.0)
    config = SpeculativeConfig(temperature=0.0, draft={"locks": {"attention": "reference.attention.plain"}})
    decoder = SpeculativeDecoder(draft, target, config)
    decoder.generate(PROMPT, 12)
    before = state.counters.misses
    decoder.generate(PROMPT, 12)
    assert state.counters.misses == before, "a role lost its hot table between rounds"
    watched = Watched(target, lab)
    with lz.scoped(deny=["extra"]):
        SpeculativeDecoder(draft, watched, config).generate(PROMPT, 4)
    assert "extra.attention.k" not in watched.ran and watched.attention()


@pytest.mark.req("R-SPEC-02")
def test_the_length_of_the_draft_changes_what_is_selected_for_verification(lab):
    """The target verifies draft_len + 1 queries a row; kernels that are made for few or for many take turns."""
    lab.use(
        lab.kernel("few.attention.k", priority=99, limits=(("seq_len_q", Limit(max=4)),)),
        lab.kernel("many.attention.k", priority=99, limits=(("seq_len_q", Limit(min=5)),)),
    )
    chosen = {}
    for length in (1, 3, 4, 7):
        draft, target = pair(0.0)
        watched = Watched(target, lab)
        SpeculativeDecoder(draft, watched, SpeculativeConfig(draft_len=length, temperature=0.0)).generate(
            PROMPT[:, :2], 8
        )
        assert target.fed[1:] and set(target.fed[1:]) == {(4, length + 1)}, (
            "one call on a batch of draft_len + 1 tokens"
        )
        chosen[length] = watched.attention()
    # Feeding the prompt takes a single query.
    assert chosen == {
        1: {"few.attention.k"},
        3: {"few.attention.k"},
        4: {"few.attention.k", "many.attention.k"},
        7: {"few.attention.k", "many.attention.k"},
    }
    query = {length: torch.randn(4, 4, length + 1, 4) for length in (3, 7)}
    key = torch.randn(4, 2, 40, 4)
    reports = {length: lz.explain("attention", query[length], key, key) for length in query}
    assert [report.context.seq_len_q for report in reports.values()] == [4, 8]
    assert [report.chosen for report in reports.values()] == ["few.attention.k", "many.attention.k"]


@pytest.mark.req("R-SPEC-02")
def test_the_length_of_the_draft_is_part_of_the_verifications_own_context():
    probs = torch.softmax(torch.randn(2, 6, 9), dim=-1)
    dims = []
    for length in (2, 5):
        ids = torch.zeros(2, length, dtype=torch.int64)
        ctx = lz.explain("sample_speculative", ids, probs[:, :length], probs[:, : length + 1]).context
        dims.append(dict(ctx.dims)["draft_len"])
    assert dims == [2, 5]


# -- what it costs -----------------------------------------------------------------------------------
@pytest.mark.req("R-SPEC-05")
def test_latency_overhead_and_speedup_are_values():
    draft, target = pair(0.05)
    decoder = SpeculativeDecoder(draft, target, SpeculativeConfig(draft_len=3, temperature=0.0))
    report = compare(decoder, PROMPT, 12)
    stats = report.stats
    assert stats.emitted == 48 and stats.drafted >= stats.accepted > 0 and report.plain_steps == 12
    for seconds in (stats.prefill_s, stats.draft_s, stats.target_s, stats.verify_s, stats.draft_latency_s):
        assert seconds > 0
    assert stats.verification_s == pytest.approx((stats.target_s + stats.verify_s) / stats.rounds)
    assert report.verification_overhead == pytest.approx(stats.verification_s / (report.plain_s / 12))
    assert report.speedup == pytest.approx(report.plain_s / report.speculative_s)
    assert stats.prefill_s + stats.draft_s + stats.target_s + stats.verify_s <= report.speculative_s
    shown = report.to_json()
    assert {"draft_latency_s", "verification_overhead", "speedup", "acceptance_rate"} <= set(shown)
    assert all(isinstance(value, (int, float)) for value in shown.values())


@pytest.mark.req("R-SPEC-05")
def test_each_second_is_counted_where_it_was_spent(monkeypatch):
    """Time by hand: a call of the draft takes 1 second, one of the target 10, a judgement half a second."""
    now, judge = [0.0], lz.sample_speculative

    def taking(seconds, call):
        def timed(*args, **kwargs):
            now[0] += seconds
            return call(*args, **kwargs)

        return timed

    monkeypatch.setattr(Clock, "_now", lambda self: now[0])
    monkeypatch.setattr(lz, "sample_speculative", taking(0.5, judge))
    draft, target = pair(0.0)
    config = SpeculativeConfig(draft_len=3, temperature=0.0)
    report = compare(SpeculativeDecoder(taking(1.0, draft), taking(10.0, target), config), PROMPT, 8)
    stats = report.stats
    assert stats.rounds == 2  # of 4 tokens each: three calls of the draft, one of the target, one judgement
    assert (stats.prefill_s, stats.draft_s, stats.target_s, stats.verify_s) == (11.0, 6.0, 20.0, 1.0)
    assert (stats.draft_latency_s, stats.verification_s) == (3.0, 10.5)
    assert (report.plain_steps, report.plain_s, report.speculative_s) == (8, 80.0, 38.0)
    assert report.verification_overhead == pytest.approx(1.05) and report.speedup == pytest.approx(80 / 38)
    shown = report.to_json()
    assert (shown["draft_latency_s"], shown["verification_s"], shown["plain_s"]) == (3.0, 10.5, 80.0)


@pytest.mark.req("R-SPEC-05")
def test_counts_are_those_of_the_rounds():
    draft, target = pair(0.0)
    stats = SpeculativeDecoder(draft, target, SpeculativeConfig(draft_len=3, temperature=0.0)).generate(PROMPT, 8).stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (2, 24, 24, 32)
    assert stats.acceptance_rate == 1.0


# -- settings ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrong",
    [
        {"draft_len": 0}, {"draft_len": True}, {"temperature": -1.0}, {"top_p": 2.0}, {"top_k": 0},
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        SpeculativeConfig(**wrong)


def test_wrong_calls_are_refused():
    draft, target = pair(0.0)
    with pytest.raises(ConfigurationError):
        SpeculativeDecoder(draft, target, SpeculativeConfig(draft={"no_such_setting": 1}))
    decoder = SpeculativeDecoder(draft, target)
    with pytest.raises(InvalidInputError):
        decoder.scope("nobody")
    for prompt, count in ((PROMPT[0], 4), (PROMPT.float(), 4), (PROMPT[:, :0], 4), (PROMPT, 0)):
        with pytest.raises(InvalidInputError):
            decoder.generate(prompt, count)
    with pytest.raises(InvalidInputError):
        TreeDecoder(draft, target, (2, 0))


def test_a_tree_by_its_widths():
    assert tree_of((2, 2)) == (-1, -1, 0, 0, 1, 1)
    assert tree_of((1, 1, 1)) == (-1, 0, 1)
    assert tree_of((3, 1)) == (-1, -1, -1, 0, 1, 2)
