"""`lz.topk_gate` against a routing written in plain Python: experts, groups, bias, ties, gradients, repeatability."""

from __future__ import annotations

import math
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

KERNELS = ("reference.topk_gate.plain", "torch.topk_gate.native")
EXAMPLES = 1_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 25
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUND = tolerance("topk_gate", torch.float32)
NAN, INF = float("nan"), float("inf")


def logits(tokens, experts, *, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, experts, generator=generator) * scale).to(dtype)


def score(row, scoring):
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in row]
    top = max(row)
    powers = [math.exp(v - top) for v in row]
    return [p / sum(powers) for p in powers]


def route(row, k, scoring="softmax", renormalize=True, bias=None, num_groups=1, top_groups=1, scale=1.0):
    """One token's experts by the definition, in Python floats; sorted() is stable, so equal ones keep their order."""
    scores = score(row, scoring)
    ranked = row if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(row) // num_groups
    best_two = [sorted(ranked[g * size : (g + 1) * size], reverse=True)[: 2 if bias else 1] for g in range(num_groups)]
    groups = sorted(range(num_groups), key=lambda g: -sum(best_two[g]))[:top_groups]
    allowed = [e for e in range(len(row)) if e // size in groups]
    ids = sorted(allowed, key=lambda e: -ranked[e])[:k]
    weights = [scores[e] for e in ids]
    total = sum(weights) if renormalize else 1.0
    return [w / total * scale for w in weights], ids


def expected(given_, k, **options):
    bias = options.pop("bias", None)
    rows = [route(row, k, bias=None if bias is None else bias.tolist(), **options) for row in given_.double().tolist()]
    return torch.tensor([w for w, _ in rows], dtype=torch.float64), torch.tensor([i for _, i in rows])


def check(given_, k, kernel=None, **options):
    weights, ids = lz.topk_gate(given_, k, backend=kernel, **options)
    want, want_ids = expected(given_, k, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, want_ids)
    assert_close(weights, want, BOUND)


# -- the definition ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (2, 1), (7, 3), (8, 2), (64, 6), (160, 6), (256, 8), (16, 16)])
@pytest.mark.req("R-MOE-01")
def test_any_number_of_experts(kernel, dtype, experts, k):
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            check(logits(19, experts, dtype=dtype), k, kernel, scoring=scoring, renormalize=renormalize, scale=1.7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.req("R-MOE-01")
def test_only_the_best_groups_are_open(kernel, scoring, biased):
    given_ = logits(24, 32, seed=3)
    bias = logits(1, 32, seed=4, scale=0.2)[0] if biased else None
    for num_groups, top_groups, k in ((8, 4, 6), (4, 1, 8), (2, 2, 5), (32, 5, 5), (16, 3, 2)):
        check(given_, k, kernel, scoring=scoring, bias=bias, num_groups=num_groups, top_groups=top_groups)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.req("R-MOE-01", "R-MOE-03")
def test_the_router_of_deepseek_v3(kernel):
    """256 experts in 8 groups of which 4 are open, 8 a token, sigmoid, correction bias, scaled by 2.5."""
    bias = logits(1, 256, seed=8, scale=0.1)[0]
    options = {"scoring": "sigmoid", "bias": bias, "num_groups": 8, "top_groups": 4, "scale": 2.5}
    given_ = logits(33, 256, seed=7)
    check(given_, 8, kernel, **options)
    weights, ids = lz.topk_gate(given_, 8, backend=kernel, **options)
    assert_close(weights.sum(dim=-1), torch.full((33,), 2.5), BOUND)
    assert all(len(set(row)) <= 4 for row in (ids // 32).tolist())


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bias_chooses_and_does_not_weigh(kernel):
    given_ = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(20, 1)
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    weights, ids = lz.topk_gate(given_, 2, scoring="sigmoid", bias=bias, renormalize=False, backend=kernel)
    assert ids[0].tolist() == [3, 0]
    assert_close(weights[0], torch.tensor([0.5, 1 / (1 + math.exp(-3))]), BOUND)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_closed_expert_is_not_taken_for_one_of_another_group(kernel):
    """An open group with masked experts: its -inf ones are chosen (with weight zero) before any of a closed group."""
    row = [5.0, -INF, -INF, -INF, 1.0, 1.0, 1.0, 1.0]
    weights, ids = lz.topk_gate(torch.tensor([row] * 17), 3, num_groups=2, top_groups=1, backend=kernel)
    assert ids[0].tolist() == [0, 1, 2]
    assert weights[0].tolist() == [1.0, 0.0, 0.0]


# -- ties and odd values -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.req("R-MOE-01")
def test_equal_experts_go_by_id(kernel, tokens):
    assert lz.topk_gate(torch.zeros(tokens, 9), 4, backend=kernel)[1].tolist() == [[0, 1, 2, 3]] * tokens
    row = torch.tensor([1.0, 2.0, -0.0, 2.0, 0.0, 2.0, 1.0])
    for scoring in ("softmax", "sigmoid"):
        ids = lz.topk_gate(row.repeat(tokens, 1), 7, scoring=scoring, backend=kernel)[1]
        assert ids.tolist() == [[1, 3, 5, 0, 6, 2, 4]] * tokens


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_that_round_to_the_same_do_not_tie(kernel):
    """exp(-200) and exp(-300) are both zero in float32, sigmoid(40) and sigmoid(90) both one; their logits differ."""
    soft = torch.tensor([[0.0, -300.0, -200.0]]).repeat(18, 1)
    assert lz.topk_gate(soft, 2, backend=kernel)[1][0].tolist() == [0, 2]
    flat = torch.tensor([[40.0, 90.0, 20.0]]).repeat(18, 1)
    assert lz.topk_gate(flat, 2, scoring="sigmoid", backend=kernel)[1][0].tolist() == [1, 0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [2, 20])
def test_nan_and_infinity(kernel, tokens):
    rows = torch.zeros(tokens, 4)
    rows[0] = torch.tensor([1.0, NAN, 3.0, INF])
    rows[1] = torch.tensor([-INF, -INF, 2.0, -INF])
    weights, ids = lz.topk_gate(rows, 2, scoring="sigmoid", renormalize=False, backend=kernel)
    assert ids[0].tolist() == [1, 3] and weights[0, 0].isnan() and weights[0, 1] == 1.0
    assert ids[1].tolist() == [2, 0] and weights[1, 1] == 0.0
    assert lz.topk_gate(rows, 2, backend=kernel)[0][0].isnan().all()
    # all scores zero: nothing to divide by, and nothing to route
    nothing = torch.full((tokens, 4), -INF)
    assert torch.equal(lz.topk_gate(nothing, 2, scoring="sigmoid", backend=kernel)[0], torch.zeros(tokens, 2))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(0, 40),
    groups=st.integers(1, 4),
    size=st.integers(1, 6),
    levels=st.integers(1, 5),
    scoring=st.sampled_from(("softmax", "sigmoid")),
    dtype=st.sampled_from(DTYPES),
    stepped=st.booleans(),
    data=st.data(),
)
@pytest.mark.req("R-MOE-01")
def test_both_kernels_choose_alike_however_many_ties(tokens, groups, size, levels, scoring, dtype, stepped, data):
    """Few different logits, any shape: ids equal the definition's, and the kernels' bits each other's."""
    experts = groups * size
    top_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, top_groups * size))
    seed = data.draw(st.integers(0, 99))
    given_ = torch.randint(-levels, levels, (tokens, experts), generator=torch.Generator().manual_seed(seed)).to(dtype)
    if stepped:
        given_ = torch.stack((given_, given_ + 100), dim=-1)[..., 0]
    options = {"scoring": scoring, "num_groups": groups, "top_groups": top_groups}
    results = [lz.topk_gate(given_, k, **options), lz.topk_gate(given_, k, backend="reference", **options)]
    if tokens:
        results.append(lz.topk_gate(given_, k, backend="torch", **options))
        want, want_ids = expected(given_, k, **options)
        assert_close(results[0][0], want, BOUND)
        assert torch.equal(results[0][1], want_ids)
    assert all(ids.shape == weights.shape == (tokens, k) for weights, ids in results)
    assert all(torch.equal(ids, results[0][1]) for _, ids in results)


# -- repeatable ----------------------------------------------------------------------------------------------
def jittered(seed, given_):
    noise = torch.rand(given_.shape, generator=torch.Generator().manual_seed(seed))
    return given_ * (0.9 + 0.2 * noise)


@pytest.mark.req("R-MOE-01")
def test_a_fixed_seed_routes_the_same_way_every_time():
    given_ = logits(64, 32, seed=1, dtype=torch.bfloat16)
    first = lz.topk_gate(jittered(5, given_), 4)
    found = []

    def again():
        found.append(lz.topk_gate(jittered(5, given_), 4))

    threads = [threading.Thread(target=again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(w, first[0]) and torch.equal(i, first[1]) for w, i in found)
    assert not torch.equal(lz.topk_gate(jittered(6, given_), 4)[1], first[1])


@pytest.mark.req("R-MOE-01")
def test_a_token_is_routed_alike_in_any_batch():
    given_ = logits(48, 64, seed=2, dtype=torch.bfloat16)
    ids = lz.topk_gate(given_, 6)[1]
    alone = torch.cat([lz.topk_gate(row[None], 6)[1] for row in given_])
    shuffled = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(alone, ids)
    assert torch.equal(lz.topk_gate(given_[shuffled], 6)[1], ids[shuffled])


# -- gradients ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_pass_gradcheck(kernel, scoring, renormalize):
    given_ = logits(3, 6).double().requires_grad_()
    bias = logits(1, 6, seed=5)[0].double()
    for options in ({}, {"bias": bias}, {"num_groups": 3, "top_groups": 2}):
        assert torch.autograd.gradcheck(
            lambda x, o=options: lz.topk_gate(x, 2, scoring=scoring, renormalize=renormalize, backend=kernel, **o)[0],
            given_,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_renormalised_softmax_is_the_softmax_of_the_chosen(dtype):
    """A closed form that needs no scores: forward and backward."""
    given_ = logits(20, 8, dtype=dtype).requires_grad_()
    weights, _ = lz.topk_gate(given_, 3)
    wide = given_.detach().double().requires_grad_()
    want = wide.topk(3, dim=-1).values.softmax(dim=-1)
    assert_close(weights, want, BOUND)
    slope = logits(20, 3, seed=9)
    (got,) = torch.autograd.grad(weights, given_, slope)
    (grad,) = torch.autograd.grad(want, wide, slope.double())
    assert_close(got, grad, tolerance("gradient", dtype))


# -- bad calls -----------------------------------------------------------------------------------------------------
G = torch.zeros(3, 8)
BAD = {
    "k of zero": (lambda: lz.topk_gate(G, 0), "VALUE_INVALID", "1 to 8"),
    "k above the experts": (lambda: lz.topk_gate(G, 9), "VALUE_INVALID", "1 to 8"),
    "k above the open experts": (lambda: lz.topk_gate(G, 5, num_groups=4, top_groups=2), "VALUE_INVALID", "1 to 4"),
    "k as float": (lambda: lz.topk_gate(G, 2.0), "TYPE_INVALID", "int"),
    "k as flag": (lambda: lz.topk_gate(G, True), "TYPE_INVALID", "int"),
    "groups that do not divide": (lambda: lz.topk_gate(G, 1, num_groups=3), "VALUE_INVALID", "a divisor of 8"),
    "more open than there are": (lambda: lz.topk_gate(G, 1, num_groups=2, top_groups=3), "VALUE_INVALID", "1 to 2"),
    "scoring": (lambda: lz.topk_gate(G, 1, scoring="tanh"), "VALUE_INVALID", "sigmoid"),
    "renormalize as number": (lambda: lz.topk_gate(G, 1, renormalize=2), "TYPE_INVALID", "True or False"),
    "scale": (lambda: lz.topk_gate(G, 1, scale=NAN), "SCALE_INVALID", "nan"),
    "scale as text": (lambda: lz.topk_gate(G, 1, scale="2"), "TYPE_INVALID", "a number"),
    "bias width": (lambda: lz.topk_gate(G, 1, bias=torch.zeros(7)), "SHAPE_INVALID", "(8,)"),
    "bias of integers": (lambda: lz.topk_gate(G, 1, bias=torch.zeros(8).int()), "DTYPE_UNSUPPORTED", "float"),
    "rank": (lambda: lz.topk_gate(torch.zeros(2, 3, 8), 1), "RANK_INVALID", "2"),
    "integers": (lambda: lz.topk_gate(G.int(), 1), "DTYPE_UNSUPPORTED", "float"),
    "no experts": (lambda: lz.topk_gate(torch.zeros(3, 0), 1), "SHAPE_INVALID", "E >= 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    lz.topk_gate(G, 2)  # a hot call of the same shape must not let a bad number through
    call, code, says = BAD[name]
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.code == code and says in str(caught.value) + str(caught.value.reasons[0])
