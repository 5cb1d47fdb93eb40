"""`lz.silu_and_mul`, `lz.gelu_and_mul`, `lz.relu_and_mul` against SciPy in float64: dtypes, edges, gradients."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, expit

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

EXAMPLES = 1_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 25
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = ("reference", "torch")
NAN, INF = float("nan"), float("inf")


def bell(v):
    return np.exp(-v * v / 2) / math.sqrt(2 * math.pi)


def tanh_slope(v):
    """d/dv of the tanh form of GELU."""
    a = math.sqrt(2 / math.pi)
    t = np.tanh(a * (v + 0.044715 * v**3))
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * a * (1 + 3 * 0.044715 * v * v)


# name -> op, its further arguments, the activation, its derivative
FORMS = {
    "swiglu": ("silu_and_mul", (), lambda v: v * expit(v), lambda v: expit(v) * (1 + v * (1 - expit(v)))),
    "geglu": (
        "gelu_and_mul", ("none",), lambda v: 0.5 * v * (1 + erf(v / math.sqrt(2))),
        lambda v: 0.5 * (1 + erf(v / math.sqrt(2))) + v * bell(v),
    ),
    "geglu-tanh": (
        "gelu_and_mul", ("tanh",), lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        tanh_slope,
    ),
    "reglu": ("relu_and_mul", (), lambda v: np.maximum(v, 0), lambda v: (v > 0).astype(float)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_they_come():
    """The kernel that is chosen answers the first call too, proven or not: two calls are compared here."""
    lz.configure(on_first_use="off")
    yield
    lz.reset()


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.req("R-MLP-01", "R-TOL-03")
def test_forward_and_backward_equal_the_formulas(form, dtype, backend):
    op, more, act, slope_of = FORMS[form]
    x = draw(3, 5, 64, dtype=dtype).requires_grad_()
    out = getattr(lz, op)(x, *more, backend=backend)
    gate, up = np.split(x.detach().double().numpy(), 2, axis=-1)
    assert_close(out, torch.from_numpy(act(gate) * up), tolerance(op, dtype))
    slope = draw(3, 5, 32, dtype=dtype, seed=1)
    (got,) = torch.autograd.grad(out, x, slope)
    upstream = slope.double().numpy()
    want = np.concatenate((upstream * slope_of(gate) * up, upstream * act(gate)), axis=-1)
    assert_close(got, torch.from_numpy(want), tolerance("gradient", dtype))


# a gate, and what each activation makes of it: exactly, in any dtype
EDGES = {
    0.0: (0.0, 0.0, 0.0, 0.0),
    1e4: (1e4, 1e4, 1e4, 1e4),
    -1e4: (0.0, 0.0, 0.0, 0.0),
    INF: (INF, INF, INF, INF),
    NAN: (NAN, NAN, NAN, NAN),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_values(dtype, backend):
    for gate, expected in EDGES.items():
        for (op, more, _, _), want in zip(FORMS.values(), expected, strict=True):
            out = getattr(lz, op)(torch.tensor([[gate, 1.0]], dtype=dtype), *more, backend=backend)
            assert torch.equal(out.nan_to_num(nan=-7.0), torch.tensor([[want]], dtype=dtype).nan_to_num(nan=-7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_denormal_gates_are_kept(form, backend):
    """Near zero every activation but ReLU halves its gate: exactly, for a number with bits to spare."""
    op, more, _, _ = FORMS[form]
    tiny = 1024 * 2.0**-149
    out = getattr(lz, op)(torch.tensor([[tiny, -tiny, 1.0, 1.0]]), *more, backend=backend)
    want = [tiny, 0.0] if form == "reglu" else [tiny / 2, -tiny / 2]
    assert torch.equal(out, torch.tensor([want]))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from(DTYPES),
    backend=st.sampled_from((None, *BACKENDS)),
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    half=st.integers(1, 20),
    step=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_shape_and_stride(form, dtype, backend, shape, half, step, seed):
    op, more, act, _ = FORMS[form]
    x = draw(*shape, 2 * half * step, dtype=dtype, seed=seed)[..., ::step]
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    out = getattr(lz, op)(x, *more, backend=backend)
    assert out.shape == (*shape, half) and out.dtype == dtype
    assert_close(out, torch.from_numpy(act(gate) * up), tolerance(op, dtype))
    assert torch.equal(out, getattr(lz, op)(x, *more, backend=backend))
