"""Sampling over random shapes, dtypes, strides and edge values: what must hold whatever comes in."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends.torch_native import sampling as torch_native
from layerzero.numerics import assert_close, tolerance

EXAMPLES = 5_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 100
EDGES = (0.0, -0.0, 1e4, -1e4, 1e-40, -1e-40, math.inf, -math.inf, math.nan, 1.0, 1.0)


@pytest.fixture(autouse=True, scope="module")
def no_sort():
    """Small vocabularies, too, take the way of large ones; they would be sorted otherwise, which is as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_native, "_SMALL", 1)
        yield


@st.composite
def rows(draw):
    """Logits [B, V]: normal numbers with edge values strewn in, of one dtype, contiguous or not."""
    batch, vocab = draw(st.integers(0, 4)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    made = torch.randn(vocab, batch, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    for _ in range(draw(st.integers(0, 6))):
        if made.numel():
            place = draw(st.integers(0, made.numel() - 1))
            made.view(-1)[place] = draw(st.sampled_from(EDGES))
    made = made.to(dtype).T
    return made if draw(st.booleans()) else made.contiguous()


@st.composite
def filters(draw):
    def maybe(strategy):
        return draw(st.none() | strategy)

    return {
        "top_k": maybe(st.integers(1, 50)),
        "top_p": maybe(st.floats(0, 1, allow_nan=False, width=32)),
        "min_p": maybe(st.floats(0, 1, allow_nan=False, width=32)),
        "temperature": draw(st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 1.0, 2.0, 1e6])),
    }


def usable(logits):
    """Which rows have a distribution."""
    return ~logits.isnan().any(dim=-1) & (logits > -math.inf).any(dim=-1)


@pytest.mark.timeout(600)
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
@settings(max_examples=EXAMPLES, deadline=None)
@given(rows(), filters(), st.integers(0, 2**31 - 1))
def test_laws_of_a_draw(logits, chosen, seed):
    before = logits.clone()
    tokens = [
        lz.sample(logits, **chosen, generator=torch.Generator().manual_seed(seed), backend=backend)
        for backend in (None, "reference", None)
    ]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were changed"
    assert tokens[0].dtype == torch.int64 and tokens[0].shape == logits.shape[:1]
    assert torch.equal(tokens[0], tokens[2]), "equal seeds gave different tokens"
    assert torch.equal(tokens[0], tokens[1]), "two kernels drew differently"
    assert torch.equal(tokens[0] >= 0, usable(logits))
    probs = lz.sampling_probs(logits, **chosen)
    for row, token in enumerate(tokens[0].tolist()):
        if token >= 0:
            assert probs[row, token] > 0, "a token without probability was drawn"
            assert logits[row, token] > -math.inf


@pytest.mark.timeout(600)
@pytest.mark.req("R-SAMP-01", "R-SAMP-02")
@settings(max_examples=EXAMPLES, deadline=None)
@given(rows(), filters())
def test_laws_of_the_probabilities(logits, chosen):
    found = lz.sampling_probs(logits, **chosen, backend="torch")
    plain = lz.sampling_probs(logits, **chosen, backend="reference")
    assert torch.equal(found > 0, plain > 0), "two kernels keep different tokens"
    assert_close(found, plain, tolerance("sampling_probs", found.dtype))
    live = usable(logits)
    assert found.shape == logits.shape and not found.isnan().any() and (found >= 0).all()
    assert torch.count_nonzero(found[~live]) == 0
    torch.testing.assert_close(found[live].sum(dim=-1), torch.ones(int(live.sum()), dtype=found.dtype))
    kept = (found > 0).sum(dim=-1)
    if chosen["top_k"] is not None:
        assert (kept <= chosen["top_k"]).all()
    for row in live.nonzero().flatten().tolist():
        first = int(logits[row].argmax())
        assert found[row, first] == found[row].max(), "the likeliest token is not the likeliest"
        if chosen["temperature"] == 0:
            assert found[row].tolist() == [float(i == first) for i in range(logits.shape[1])]
        # What is kept is a prefix of the ranking: nothing that is left out is larger than something kept.
        out = logits[row][found[row] == 0]
        assert not out.numel() or out.max() <= logits[row][found[row] > 0].min()


@pytest.mark.timeout(600)
@pytest.mark.req("R-SAMP-02")
@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(rows(), filters(), st.randoms(use_true_random=False))
def test_more_room_never_takes_a_token_away(logits, chosen, random):
    """A larger k or p, a smaller min-p: the kept tokens stay kept."""
    wider = dict(chosen)
    if chosen["top_k"] is not None:
        wider["top_k"] = chosen["top_k"] + random.randint(0, 5)
    elif chosen["top_p"] is not None:
        wider["top_p"] = min(1.0, chosen["top_p"] + random.random() / 2)
    if chosen["min_p"] is not None:
        wider["min_p"] = chosen["min_p"] * random.random()
    if chosen["top_k"] is not None and chosen["top_p"] is not None:
        wider["top_p"] = 1.0  # the share is of what top-k leaves, so a larger k alone may move the cut
    less, more = (lz.sampling_probs(logits, **options) > 0 for options in (chosen, wider))
    assert not (less & ~more).any()
