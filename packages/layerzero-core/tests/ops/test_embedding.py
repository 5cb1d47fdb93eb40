"""`lz.embedding` against an explicit loop: rows bit by bit, padding, gradients, ids that are no rows."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

EXAMPLES = 1_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 25
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BACKENDS = ("reference", "torch")


def table(rows, width, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def gradient(ids, slope, rows, padding_idx):
    """What each row of the table gets back: the sum over the places that named it, the padding row nothing."""
    found = torch.zeros(rows, slope.shape[-1], dtype=torch.float64)
    for place, row in zip(ids.flatten().tolist(), slope.double().view(-1, slope.shape[-1]), strict=True):
        if padding_idx is None or place != padding_idx % rows:
            found[place] += row
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1, -7])
@pytest.mark.req("R-EMB-01")
def test_rows_are_copied_and_gradients_add_up(backend, dtype, index, padding_idx):
    weight = table(7, 5, dtype=dtype).requires_grad_()
    ids = torch.tensor([[0, 6, 3, 3], [3, 0, 6, 1]], dtype=index)
    out = lz.embedding(ids, weight, padding_idx, backend=backend)
    assert out.dtype == dtype and out.shape == (2, 4, 5)
    for place, row in zip(ids.flatten().tolist(), out.view(-1, 5), strict=True):
        assert torch.equal(row, weight[place])  # the padding row is a row like any other on the way in
    slope = table(8, 5, dtype=dtype, seed=1).view(2, 4, 5)
    (got,) = torch.autograd.grad(out, weight, slope)
    assert_close(got, gradient(ids, slope, 7, padding_idx), tolerance("gradient", dtype))
    if padding_idx is not None:
        assert torch.equal(got[padding_idx], torch.zeros(5, dtype=dtype))


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.req("R-EMB-01")
def test_it_is_the_embedding_of_torch(padding_idx):
    layer = torch.nn.Embedding(9, 4, padding_idx)
    with torch.no_grad():
        layer.weight.copy_(table(9, 4))
    ids = torch.tensor([8, 2, 2, 0, 5])
    weight = layer.weight.detach().clone().requires_grad_()
    got, want = lz.embedding(ids, weight, padding_idx), layer(ids)
    assert torch.equal(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(weight.grad, layer.weight.grad)


def test_gradcheck():
    ids = torch.tensor([[1, 1], [0, 2]])
    weight = table(4, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: lz.embedding(ids, w), weight)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    rows=st.integers(1, 12),
    width=st.integers(1, 9),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from((torch.int32, torch.int64)),
    step=st.integers(1, 2),
    odd=st.sampled_from((0.0, -0.0, 1e-41, 1e4, float("inf"), float("nan"))),
    data=st.data(),
)
@pytest.mark.req("R-EMB-01")
def test_any_ids_and_any_table(rows, width, shape, dtype, index, step, odd, data):
    padding_idx = data.draw(st.none() | st.integers(-rows, rows - 1))
    weight = table(rows, width * step, dtype=dtype)[:, ::step]
    weight[0, 0] = odd
    ids = torch.randint(rows, shape, generator=torch.Generator().manual_seed(rows), dtype=index)
    out = lz.embedding(ids, weight, padding_idx)
    assert out.shape == (*shape, width) and out.dtype == dtype
    want = torch.stack([weight[i] for i in ids.flatten().tolist()]) if ids.numel() else out.view(-1, width)
    bits = {torch.float64: torch.int64, torch.float32: torch.int32}.get(dtype, torch.int16)
    assert torch.equal(out.reshape(-1, width).view(bits), want.contiguous().view(bits))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("bad", [-1, 5, 10**6])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.req("R-EMB-01")
def test_an_id_outside_the_table_is_refused_hot_and_cold(backend, bad, index):
    weight, good = table(5, 3), torch.tensor([0, 4], dtype=index)
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            lz.embedding(torch.tensor([0, bad], dtype=index), weight, backend=backend)
        assert caught.value.code == "VALUE_INVALID"
        assert str(bad) in str(caught.value.reasons[0].value) and "4" in str(caught.value.reasons[0].limit)
        lz.embedding(good, weight, backend=backend)  # from here on the shape is hot


def test_a_padding_idx_outside_the_table_is_refused():
    for bad in (5, -6, 1.0, True):
        with pytest.raises(InvalidInputError) as caught:
            lz.embedding(torch.tensor([0]), table(5, 3), bad)
        assert caught.value.code == "VALUE_INVALID"
