"""The reference gated activations, linear and embedding against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from layerzero.backends.reference.feed_forward import embedding, gelu_and_mul, linear, relu_and_mul, silu_and_mul
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


CASES = [
    ("silu_and_mul", silu_and_mul, silu),
    ("gelu_and_mul", lambda x: gelu_and_mul(x, "none"), gelu),
    ("gelu_and_mul", lambda x: gelu_and_mul(x, "tanh"), gelu_tanh),
    ("relu_and_mul", relu_and_mul, lambda x: x.clamp(min=0)),
]
IDS = ["swiglu", "geglu", "geglu-tanh", "reglu"]


@pytest.mark.parametrize(("op", "kernel", "act"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-MLP-01", "R-TOL-03")
def test_the_first_half_gates_the_second(op, kernel, act, dtype):
    x = draw(3, 5, 64, dtype=dtype)
    out = kernel(x)
    assert out.shape == (3, 5, 32) and out.dtype == dtype
    gate, up = x.double()[..., :32], x.double()[..., 32:]
    assert_close(out, act(gate) * up, tolerance(op, dtype))


@pytest.mark.parametrize(("op", "kernel", "act"), CASES, ids=IDS)
def test_zero_and_large_gates(op, kernel, act):
    x = torch.tensor([[0.0, 300.0, -300.0, 2.0, 2.0, 2.0]])
    assert torch.equal(kernel(x), torch.tensor([[0.0, 600.0, 0.0]]))


@pytest.mark.parametrize(("op", "kernel", "act"), CASES, ids=IDS)
def test_gated_gradients_pass_gradcheck(op, kernel, act):
    assert torch.autograd.gradcheck(kernel, (draw(2, 6).requires_grad_(),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "act"),
    [
        (None, lambda x: x),
        ("gelu", gelu),
        ("gelu_tanh", gelu_tanh),
        ("silu", silu),
        ("relu", lambda x: x.clamp(min=0)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.req("R-MLP-01", "R-TOL-03")
def test_linear_with_bias_and_activation(dtype, name, act, biased):
    x, w = draw(2, 3, 48, dtype=dtype), draw(16, 48, dtype=dtype, seed=1) / 8
    b = draw(16, dtype=dtype, seed=2) if biased else None
    want = torch.einsum("bsk,nk->bsn", x.double(), w.double())
    want = act(want if b is None else want + b.double())
    out = linear(x, w, b, name)
    assert out.dtype == dtype
    assert_close(out, want, tolerance("linear", dtype, k=48))


@pytest.mark.req("R-TOL-03")
def test_a_long_float32_product_needs_the_bound_that_grows_with_its_length():
    x, w = draw(8, 8192, dtype=torch.float32), draw(16, 8192, dtype=torch.float32, seed=1)
    want = x.double() @ w.double().T
    assert_close(linear(x, w, None, None), want, tolerance("linear", "fp32", k=8192))


def test_linear_follows_autocast():
    x, w = draw(2, 8, dtype=torch.float32), draw(4, 8, dtype=torch.float32, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w, None, "gelu").dtype == F.linear(x, w).dtype == torch.bfloat16


def test_an_unknown_activation_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInputError, match="gelu_tanh"):
        linear(draw(1, 2), draw(2, 2), None, "swish")


def test_linear_gradients_pass_gradcheck():
    args = (draw(2, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_())
    assert torch.autograd.gradcheck(lambda *t: linear(*t, "gelu"), args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.req("R-EMB-01")
def test_embedding_copies_rows_bit_by_bit(dtype, index):
    weight = draw(10, 6, dtype=dtype)
    ids = torch.tensor([[0, 9, 3], [3, 3, 0]], dtype=index)
    out = embedding(ids, weight, 0)
    want = torch.stack([torch.stack([weight[i] for i in row]) for row in ids.tolist()])
    assert torch.equal(out, want)
    assert tolerance("embedding", dtype).exact


@pytest.mark.req("R-EMB-01")
def test_the_padding_row_gets_no_gradient_and_repeats_add_up():
    weight = draw(5, 3).requires_grad_()
    embedding(torch.tensor([1, 2, 2, 4]), weight, 1).sum().backward()
    assert weight.grad.sum(dim=1).tolist() == [0.0, 0.0, 6.0, 0.0, 3.0]


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_outside_the_table_is_an_error(bad):
    with pytest.raises(IndexError):
        embedding(torch.tensor([bad]), draw(5, 3), None)
