"""Sampling through the public ops: the distribution, the support, ties, seeds and logits that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance
from layerzero.tuning.truth import UNLIKELY, chi_square
from layerzero_verify.testing.run import counts_of

INF, NAN = math.inf, math.nan
BACKENDS = ("reference", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (top_k, top_p, min_p, temperature)
FILTERS = {
    "none": (None, None, None, 1.0),
    "temperature": (None, None, None, 0.6),
    "greedy": (None, None, None, 0.0),
    "top_k": (7, None, None, 0.8),
    "top_p": (None, 0.7, None, 0.8),
    "top_p, flat": (None, 0.95, None, 30.0),
    "min_p": (None, None, 0.1, 1.3),
    "top_k and top_p": (20, 0.8, None, 1.0),
    "all": (20, 0.9, 0.02, 1.2),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=seeded(seed)).mul(2).to(dtype)


def options(name):
    top_k, top_p, min_p, temperature = FILTERS[name]
    return {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}


def oracle(row, top_k=None, top_p=None, min_p=None, temperature=1.0):
    """One row of probabilities, written out over Python numbers."""
    row = [float(x) for x in row]
    if any(math.isnan(x) for x in row) or max(row) == -INF:
        return [0.0] * len(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    top = row[order[0]]
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    weight = [1.0 if x == top else math.exp((x - top) / temperature) if x > -INF and top < INF else 0.0 for x in row]
    kept = order if top_k is None else order[:top_k]
    if top_p is not None and top_p < 1:
        whole, mass, reached = math.fsum(weight[i] for i in kept), 0.0, []
        for i in kept:
            if reached and mass >= top_p * whole * (1 - 1e-8):
                break
            reached.append(i)
            mass += weight[i]
        kept = reached
    if min_p is not None:
        kept = [i for i in kept if weight[i] >= min_p * weight[order[0]]]
    total, found = math.fsum(weight[i] for i in kept), [0.0] * len(row)
    for i in kept:
        found[i] = weight[i] / total
    return found


# -- the distribution --------------------------------------------------------------------------------
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_probabilities_are_those_of_the_definition(name, dtype, backend):
    logits = randn(3, 60, dtype=dtype)
    found = lz.sampling_probs(logits, **options(name), backend=backend)
    expected = torch.tensor([oracle(row, *FILTERS[name]) for row in logits.tolist()], dtype=torch.float64)
    assert found.dtype == torch.float32 and torch.equal(found > 0, expected > 0)
    assert_close(found, expected, tolerance("sampling_probs", torch.float32))


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILTERS)
def test_probabilities_of_a_vocabulary_that_is_not_sorted_any_more(name, backend):
    logits = randn(2, 5000, seed=4, dtype=torch.bfloat16)  # bfloat16: hundreds of ties
    found = lz.sampling_probs(logits, **options(name), backend=backend)
    expected = torch.tensor([oracle(row, *FILTERS[name]) for row in logits.tolist()], dtype=torch.float64)
    assert torch.equal(found > 0, expected > 0)
    assert_close(found, expected, tolerance("sampling_probs", torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tenths", range(1, 10))
@pytest.mark.parametrize("vocab", [10, 5000])
def test_top_p_of_equal_tokens_keeps_exactly_the_share_and_the_lower_ids(vocab, tenths, backend):
    """No rounding of a sum may add a token: 7/10 of ten equal ones are seven."""
    probs = lz.sampling_probs(torch.zeros(1, vocab), top_p=tenths / 10, backend=backend)
    kept = vocab * tenths // 10
    assert probs[0].nonzero().flatten().tolist() == list(range(kept))


@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in FILTERS if name != "greedy"])
def test_draws_follow_the_probabilities(name, backend):
    logits = randn(1, 30, seed=9)
    tokens = lz.sample(logits.expand(20_000, -1), **options(name), generator=seeded(1), backend=backend)
    probs = torch.tensor(oracle(logits[0].tolist(), *FILTERS[name]))
    assert chi_square(counts_of(tokens, 30), probs) > UNLIKELY


@pytest.mark.req("R-SAMP-01", "R-API-06", "R-API-07")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_short_forms_draw_as_the_long_one(backend):
    logits = randn(30, 5000, seed=2)
    pairs = [
        (lz.sample_topk(logits, 9, temperature=0.7, generator=seeded(), backend=backend), {"top_k": 9}),
        (lz.sample_topp(logits, 0.8, temperature=0.7, generator=seeded(), backend=backend), {"top_p": 0.8}),
    ]
    for found, filters in pairs:
        assert torch.equal(found, lz.sample(logits, temperature=0.7, **filters, generator=seeded(), backend=backend))


@pytest.mark.req("R-API-06", "R-API-07")
@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_the_short_forms_draw_from_the_best_tokens_as_often_as_the_definition_says(name, backend):
    short, given = {"top_k": (lz.sample_topk, 7), "top_p": (lz.sample_topp, 0.7)}[name]
    logits = randn(2, 30, seed=9).repeat(10_000, 1)
    tokens = short(logits, given, temperature=0.8, generator=seeded(1), backend=backend)
    assert tokens.shape == (20_000,)
    for row in range(2):
        probs = torch.tensor(oracle(logits[row].tolist(), *FILTERS[name]))
        assert 1 < int((probs > 0).sum()) < 30
        assert chi_square(counts_of(tokens[row::2], 30), probs) > UNLIKELY


@pytest.mark.req("R-API-06", "R-API-07")
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_the_short_forms_take_a_number_for_each_row(backend):
    logits = randn(1, 40, seed=3).repeat(400, 1)
    ks, ps = torch.tensor([1, 3, 10, 40]).repeat(100), torch.tensor([0.1, 0.4, 0.8, 1.0]).repeat(100)
    drawn = {
        "top_k": (ks, lz.sample_topk(logits, ks, generator=seeded(2), backend=backend)),
        "top_p": (ps, lz.sample_topp(logits, ps, generator=seeded(2), backend=backend)),
    }
    for name, (given, tokens) in drawn.items():
        for row in range(4):
            kept = torch.tensor(oracle(logits[0].tolist(), **{name: given[row].item()})) > 0
            assert kept[tokens[row::4]].all(), (name, row)
        widest = tokens[3::4].unique().numel()
        assert tokens[0::4].unique().numel() < widest and widest > 5


def test_a_sampler_with_another_temperature_is_noticed():
    logits = randn(1, 30, seed=9)
    tokens = lz.sample(logits.expand(20_000, -1), temperature=1.1, generator=seeded(1))
    assert chi_square(counts_of(tokens, 30), lz.sampling_probs(logits)) < UNLIKELY
    assert chi_square(torch.tensor([5, 1]), torch.tensor([1.0, 0.0])) == 0.0


def test_the_chi_square_probability_is_the_textbook_one():
    # statistic (12² + 12²) / 50 = 5.76 on one degree of freedom
    assert chi_square(torch.tensor([62, 38]), torch.tensor([0.5, 0.5])) == pytest.approx(0.016395, abs=1e-6)
    with pytest.raises(ValueError, match="2 counts for 3"):
        chi_square(torch.tensor([1, 2]), torch.ones(3))


# -- seeds -------------------------------------------------------------------------------------------
@pytest.mark.req("R-SAMP-02", "R-TOL-05")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("name", FILTERS)
def test_every_kernel_draws_the_same_tokens_from_the_same_state(name, vocab, dtype):
    logits = randn(12, vocab, seed=3, dtype=dtype)
    found = [lz.sample(logits, **options(name), generator=seeded(5), backend=backend) for backend in BACKENDS]
    assert tolerance("sample", dtype).exact
    assert torch.equal(*found)


@pytest.mark.req("R-SAMP-02", "R-TOL-05")
def test_a_call_is_determined_by_the_generator_alone():
    logits = randn(8, 6000)
    call = {"top_p": 0.9, "temperature": 0.8}
    first = lz.sample(logits, **call, generator=seeded(3))
    lz.sample(logits[:2], generator=seeded(4))
    assert torch.equal(first, lz.sample(logits, **call, generator=seeded(3)))
    assert not torch.equal(first, lz.sample(logits, **call, generator=seeded(4)))
    torch.manual_seed(11)
    default = lz.sample(logits, **call)
    torch.manual_seed(11)
    assert torch.equal(default, lz.sample(logits, **call))
    assert not torch.equal(default, lz.sample(logits, **call)), "the default generator does not move on"


@pytest.mark.req("R-SAMP-02")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_draws_the_same_whatever_stands_beside_it(backend):
    logits = randn(6, 5000)
    other = torch.cat((randn(3, 5000, seed=8) * 9, logits[3:]))
    one, two = (lz.sample(x, top_p=0.8, generator=seeded(), backend=backend) for x in (logits, other))
    assert torch.equal(one[3:], two[3:])


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [60, 5000])
def test_a_tensor_of_parameters_is_one_number_for_each_row(vocab, backend):
    logits = randn(24, vocab, seed=6)
    ks, ps = torch.tensor([1, 3, 10, 60] * 6), torch.tensor([0.25, 0.5, 0.875, 1.0] * 6)
    ms, ts = torch.tensor([0.0, 0.125, 0.5, 1.0] * 6), torch.tensor([0.0, 0.5, 1.0, 2.0] * 6)
    given = {"top_k": ks, "top_p": ps, "min_p": ms, "temperature": ts}
    every = [{key: given[key] for key in keys} for keys in (given, ["top_k"], ["top_p"], ["min_p"], ["temperature"])]
    for params in every:
        tokens = lz.sample(logits, **params, generator=seeded(), backend=backend)
        probs = lz.sampling_probs(logits, **params, backend=backend)
        for row in range(4):
            alone = {key: value[row].item() for key, value in params.items()}
            same = lz.sample(logits, **alone, generator=seeded(), backend=backend)
            assert torch.equal(tokens[row::4], same[row::4]), (row, list(params))
            assert_close(
                probs[row::4],
                lz.sampling_probs(logits, **alone, backend=backend)[row::4],
                tolerance("sampling_probs", torch.float32),
            )


# -- ties, and logits that are not finite ------------------------------------------------------------
@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_logits_the_lower_ids_stay(backend, dtype):
    logits = torch.zeros(200, 5000, dtype=dtype)
    logits[:, [7, 4000]] = 1.0
    assert lz.sample_topk(logits[:1], 1, temperature=0.0, backend=backend).tolist() == [7]
    tokens = lz.sample_topk(logits, 5, generator=seeded(), backend=backend)
    assert tokens.unique().tolist() == [0, 1, 2, 7, 4000]
    assert lz.sampling_probs(logits[:1], top_k=1, backend=backend)[0].nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "by_row"), [(6, False), (6, True), (5000, False)])
@pytest.mark.parametrize("name", FILTERS)
def test_infinite_logits_and_nan_are_defined(name, vocab, by_row, backend):
    logits = torch.zeros(6, vocab)
    logits[0, ::2] = -INF  # banned
    logits[1, [1, 4]] = INF  # these two alone
    logits[2] = -INF
    logits[2, 3] = -1e4  # the only one that is left
    logits[3] = -INF  # nothing is left
    logits[4, 2] = NAN
    logits[5, 1], logits[5, 3] = INF, -INF
    given = options(name)
    if by_row:
        given = {key: None if value is None else torch.tensor([value] * 6) for key, value in given.items()}
    probs = lz.sampling_probs(logits, **given, backend=backend)
    expected = torch.tensor([oracle(row, *FILTERS[name]) for row in logits.tolist()])
    assert_close(probs, expected, tolerance("sampling_probs", torch.float32))
    for seed in range(5):
        tokens = lz.sample(logits, **given, generator=seeded(seed), backend=backend)
        assert tokens[0] % 2 == 1 and tokens[1].item() in (1, 4)
        assert tokens[2:].tolist() == [3, -1, -1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1e4, 1e-40, 0.0])
def test_huge_denormal_and_zero_logits_have_a_distribution(scale, backend):
    logits = randn(4, 5000, seed=1).clamp(-1, 1) * scale
    for name in ("temperature", "top_p", "all"):
        probs = lz.sampling_probs(logits, **options(name), backend=backend)
        expected = torch.tensor([oracle(row, *FILTERS[name]) for row in logits.tolist()])
        assert_close(probs, expected, tolerance("sampling_probs", torch.float32))


@pytest.mark.req("R-SAMP-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_128k(dtype):
    logits = randn(1, 128 * 1024, seed=5, dtype=dtype)
    for name in ("top_k and top_p", "top_p", "top_p, flat", "all"):
        fast, plain = (
            lz.sampling_probs(logits, **options(name), backend=backend) for backend in ("torch", "reference")
        )
        assert torch.equal(fast > 0, plain > 0), name
        assert_close(fast, plain, tolerance("sampling_probs", torch.float32))
        tokens = [lz.sample(logits, **options(name), generator=seeded(s), backend="torch").item() for s in range(20)]
        assert all(plain[0, token] > 0 for token in tokens), name


# -- the public form ---------------------------------------------------------------------------------
@pytest.mark.usefixtures("built_in")
def test_the_kernels_without_a_sort_are_chosen_on_the_cpu():
    logits = randn(2, 300)
    # layerzero-cpu's own where it is installed with its library
    assert lz.which("sample", logits, top_p=0.9) in ("torch.sample.sort_free", "cpu.sample.select")
    assert lz.which("sample_topp", logits, 0.9) in ("torch.sample_topp.sort_free", "cpu.sample_topp.select")
    chosen = lz.which("sample_topk", logits, torch.tensor([3, 4]))
    assert chosen in ("torch.sample_topk.topk_first", "cpu.sample_topk.select")
    assert lz.which("sampling_probs", logits, top_p=0.9) == "torch.sampling_probs.sort_free"
    assert lz.which("sampling_probs", logits.requires_grad_(), top_p=0.9) == "reference.sampling_probs.plain"


def test_probabilities_keep_the_shape_of_the_logits():
    logits = randn(2, 3, 40)
    by_batch, by_row = torch.tensor([0.5, 2.0]), torch.tensor([[0.5] * 3, [2.0] * 3])
    found = lz.sampling_probs(logits, top_k=8, temperature=by_batch)
    assert found.shape == logits.shape
    assert torch.equal(found, lz.sampling_probs(logits, top_k=8, temperature=by_row))
    assert torch.equal(found[1], lz.sampling_probs(logits[1], top_k=8, temperature=2.0))


def test_float64_logits_give_float64_probabilities():
    logits = randn(2, 50).double()
    for backend in BACKENDS:
        found = lz.sampling_probs(logits, top_p=0.9, backend=backend)
        assert found.dtype == torch.float64
        torch.testing.assert_close(
            found,
            torch.tensor([oracle(row, top_p=0.9) for row in logits.tolist()], dtype=torch.float64),
            rtol=1e-12,
            atol=1e-15,
        )


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "greedy"])
def test_gradients_of_the_probabilities(name):
    logits = randn(3, 9, seed=7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: lz.sampling_probs(x, **options(name)), (logits,))
    temperature = torch.tensor([0.7, 1.1, 0.9], dtype=torch.float64, requires_grad=True)
    given = {**options(name), "temperature": temperature}
    assert torch.autograd.gradcheck(
        lambda t: lz.sampling_probs(logits.detach(), **{**given, "temperature": t}), temperature
    )


BAD = {
    "k of true": (lambda: lz.sample(randn(2, 9), top_k=True), "VALUE_INVALID"),
    "p below zero": (lambda: lz.sample(randn(2, 9), top_p=-0.1), "VALUE_INVALID"),
    "min_p above one": (lambda: lz.sampling_probs(randn(2, 9), min_p=1.5), "VALUE_INVALID"),
    "an infinite temperature": (lambda: lz.sampling_probs(randn(2, 9), temperature=INF), "VALUE_INVALID"),
    "a NaN temperature": (lambda: lz.sample(randn(2, 9), temperature=NAN), "VALUE_INVALID"),
    "parameters of another batch": (lambda: lz.sampling_probs(randn(2, 9), top_p=torch.ones(3)), "SHAPE_INVALID"),
    "parameters of no axis": (lambda: lz.sampling_probs(randn(2, 4, 9), top_p=torch.ones(4)), "SHAPE_INVALID"),
    "no vocabulary": (lambda: lz.sampling_probs(randn(2, 0)), "SHAPE_INVALID"),
    "one axis": (lambda: lz.sampling_probs(randn(9)), "RANK_INVALID"),
    "no tensor": (lambda: lz.sampling_probs([1.0, 2.0]), "TYPE_INVALID"),
    "integers": (lambda: lz.sampling_probs(torch.ones(2, 9, dtype=torch.int64)), "DTYPE_UNSUPPORTED"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code
