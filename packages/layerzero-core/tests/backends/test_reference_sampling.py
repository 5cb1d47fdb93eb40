"""The reference sampling: who may be drawn, how often, and from which random numbers."""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.reference.sampling import sample, sample_topk, sample_topp
from layerzero.numerics import tolerance

DRAWS = 20_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def logits_of(probs, rows=DRAWS):
    return torch.tensor(probs, dtype=torch.float64).log().expand(rows, -1)


def shares(tokens, vocab):
    return torch.bincount(tokens, minlength=vocab).double() / tokens.numel()


def expect(tokens, probs):
    """Observed shares within five standard deviations of a binomial; a share of zero must be exact."""
    probs = torch.tensor(probs, dtype=torch.float64)
    observed = shares(tokens, len(probs))
    assert torch.count_nonzero(observed[probs == 0]) == 0
    assert ((observed - probs).abs() <= 5 * (probs * (1 - probs) / tokens.numel()).sqrt()).all(), observed


P = [0.1, 0.4, 0.05, 0.3, 0.15]


@pytest.mark.parametrize(
    ("k", "want"),
    [
        (1, [0, 1, 0, 0, 0]),
        (2, [0, 4 / 7, 0, 3 / 7, 0]),
        (3, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (5, P),
        (99, P),
        (0, P),
    ],
)
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
def test_top_k_draws_the_k_likeliest_in_proportion(k, want):
    tokens = sample_topk(logits_of(P), k, 1.0, seeded())
    assert tokens.dtype == torch.int64 and tokens.shape == (DRAWS,)
    expect(tokens, want)


@pytest.mark.parametrize(
    ("p", "want"),
    [
        (0.0, [0, 1, 0, 0, 0]),
        (0.39, [0, 1, 0, 0, 0]),
        (0.41, [0, 4 / 7, 0, 3 / 7, 0]),
        (0.69, [0, 4 / 7, 0, 3 / 7, 0]),
        (0.71, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (1.0, P),
    ],
)
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
def test_top_p_draws_the_smallest_set_that_reaches_p(p, want):
    expect(sample_topp(logits_of(P), p, 1.0, seeded()), want)


def test_top_p_stops_at_the_token_that_reaches_p_exactly():
    assert torch.count_nonzero(sample_topp(torch.zeros(1000, 2), 0.5, 1.0, seeded())) == 0


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "want"),
    [
        (None, None, None, P),
        (3, 0.8, None, [0, 4 / 7, 0, 3 / 7, 0]),  # of the top three, 8/17 + 6/17 = 0.82 reach 0.8
        (3, 0.83, None, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (None, None, 0.5, [0, 4 / 7, 0, 3 / 7, 0]),  # 0.3 >= 0.5 * 0.4 > 0.15
        (None, None, 1.0, [0, 1, 0, 0, 0]),
        (2, None, 0.9, [0, 1, 0, 0, 0]),
        (None, 0.9, 0.3, [0, 8 / 17, 0, 6 / 17, 3 / 17]),
    ],
)
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
def test_filters_combine_in_the_documented_order(top_k, top_p, min_p, want):
    expect(sample(logits_of(P), top_k, top_p, min_p, 1.0, seeded()), want)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
def test_temperature_raises_probabilities_to_its_inverse(temperature):
    power = torch.tensor(P, dtype=torch.float64) ** (1 / temperature)
    expect(sample_topk(logits_of(P), 5, temperature, seeded()), (power / power.sum()).tolist())


@pytest.mark.req("R-SAMP-01")
def test_temperature_zero_is_argmax_and_draws_no_random_number():
    logits = torch.randn(16, 50, generator=seeded(3))
    gen = seeded()
    state = gen.get_state()
    for tokens in (sample_topk(logits, 5, 0.0, gen), sample_topp(logits, 0.9, 0, gen)):
        assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(gen.get_state(), state)


def test_a_tiny_temperature_is_nearly_greedy_without_overflow():
    logits = torch.randn(16, 50, generator=seeded(3)) * 100
    assert torch.equal(sample_topp(logits, 1.0, 1e-30, seeded()), logits.argmax(-1))


@pytest.mark.req("R-SAMP-02", "R-TOL-05")
def test_equal_seeds_draw_equal_tokens_and_the_generator_moves_on():
    logits = torch.randn(64, 100, generator=seeded(1))
    gen = seeded(7)
    first, second = (sample(logits, 20, 0.9, 0.01, 0.8, gen) for _ in range(2))
    assert torch.equal(first, sample(logits, 20, 0.9, 0.01, 0.8, seeded(7)))
    assert not torch.equal(first, second)
    assert tolerance("sample", "float32").exact
    torch.manual_seed(5)
    globally = sample_topk(logits, 20, 1.0, None)
    torch.manual_seed(5)
    assert torch.equal(globally, sample_topk(logits, 20, 1.0, None))


@pytest.mark.req("R-SAMP-01")
def test_a_parameter_tensor_draws_what_the_number_draws_row_by_row():
    logits = torch.randn(32, 60, generator=seeded(2))
    ks, ps = torch.tensor([1, 3, 10, 60] * 8), torch.tensor([0.0, 0.5, 0.9, 1.0] * 8)
    ts = torch.tensor([0.0, 0.5, 1.0, 2.0] * 8)
    by_tensor = sample(logits, ks, ps, None, ts, seeded())
    for group in range(4):
        number = sample(logits, int(ks[group]), float(ps[group]), None, float(ts[group]), seeded())
        assert torch.equal(by_tensor[group::4], number[group::4]), group
    assert torch.equal(
        sample_topk(logits, torch.full((32,), 10), 1.0, seeded()), sample_topk(logits, 10, 1.0, seeded())
    )
    assert torch.equal(
        sample_topp(logits, torch.full((32,), 0.5), 1.0, seeded()), sample_topp(logits, 0.5, 1.0, seeded())
    )


@pytest.mark.req("R-SAMP-01")
def test_greedy_rows_in_a_temperature_tensor_take_the_argmax():
    logits = torch.randn(40, 30, generator=seeded(4))
    greedy = torch.arange(40) % 2 == 0
    tokens = sample_topp(logits, 1.0, torch.where(greedy, 0.0, 5.0), seeded())
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(tokens[~greedy], logits.argmax(-1)[~greedy])


def test_a_banned_token_is_never_drawn():
    logits = torch.zeros(DRAWS, 4)
    logits[:, 2] = -float("inf")
    expect(sample_topp(logits, 1.0, 1.0, seeded()), [1 / 3, 1 / 3, 0, 1 / 3])
    expect(sample_topk(logits, 4, 1.0, seeded()), [1 / 3, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ties_keep_exactly_k_tokens_the_lower_ids_first(dtype):
    tokens = sample_topk(torch.zeros(4000, 10, dtype=dtype), 3, 1.0, seeded())
    assert tokens.unique().tolist() == [0, 1, 2]


def test_huge_vocabulary_keeps_its_tail():
    """Half the mass lies on 2**17 tokens of 4e-6 each; half the draws must be among them, hardly one twice."""
    vocab = 2**17
    logits = torch.full((1, vocab), 0.0)
    logits[0, 0] = torch.tensor(float(vocab - 1)).log()
    gen = seeded()
    tokens = torch.cat([sample_topp(logits, 1.0, 1.0, gen) for _ in range(60)])
    assert 15 <= int((tokens == 0).sum()) <= 45
    assert tokens[tokens > 0].unique().numel() >= int((tokens > 0).sum()) - 1


@pytest.mark.parametrize("seed", range(5))
def test_drawn_tokens_always_lie_inside_both_sets(seed):
    logits = torch.randn(200, 40, generator=seeded(seed)) * 3
    tokens = sample(logits, 8, 0.7, 0.05, 1.0, seeded(seed))
    probs = logits.double().softmax(-1)
    rank = (probs > probs.gather(1, tokens[:, None])).sum(-1)
    above = (probs * (probs > probs.gather(1, tokens[:, None]))).sum(-1)
    top8 = probs.topk(8).values.sum(-1)
    assert (rank < 8).all()
    assert (above / top8 < 0.7).all()
    assert (probs.gather(1, tokens[:, None])[:, 0] >= 0.05 * probs.max(-1).values).all()


def test_logits_stay_untouched_and_an_empty_batch_is_fine():
    logits = torch.randn(4, 9, generator=seeded())
    copy = logits.clone()
    sample(logits, 3, 0.5, 0.1, 0.7, seeded())
    assert torch.equal(logits, copy)
    assert sample_topk(torch.zeros(0, 9), 3, 1.0, seeded()).shape == (0,)


def test_strided_logits_draw_the_same_tokens():
    logits = torch.randn(30, 8, generator=seeded()).T
    assert torch.equal(sample_topp(logits, 0.9, 1.0, seeded()), sample_topp(logits.contiguous(), 0.9, 1.0, seeded()))


def test_is_traceable_in_one_graph():
    traced = torch.compile(sample, fullgraph=True, backend="eager", dynamic=False)
    logits = torch.randn(8, 20, generator=seeded())
    tokens = traced(logits, torch.full((8,), 1), 0.9, None, torch.ones(8), None)
    assert torch.equal(tokens, logits.argmax(-1))
