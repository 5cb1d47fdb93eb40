"""Gemma's norms and mixed dtypes in every norm: against float64 formulas, forward and backward, on every kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import Tolerance, assert_close, compare, tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["torch", "reference"]


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def formula(x, weight, eps, offset=1.0):
    """Row by row in float64."""
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(64,), (3, 40), (2, 5, 1024)])
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_gemma_rms_norm_is_the_formula(backend, dtype, shape):
    x, w = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1) * 0.5
    out = lz.gemma_rms_norm(x, w, 1e-6, backend=backend)
    assert out.dtype == dtype
    assert_close(out, formula(x, w, 1e-6), tolerance("gemma_rms_norm", dtype))
    assert not compare(out, formula(x, w, 1e-6, offset=0.0), Tolerance(1e-1, 1e-1)).ok


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", [None, torch.float32])
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_gemma_add_rms_norm_is_the_sum_then_the_norm(backend, dtype, stream):
    x, r = draw(4, 96, dtype=dtype), draw(4, 96, dtype=stream or dtype, seed=1)
    w = draw(96, dtype=dtype, seed=2) * 0.5
    out, new = lz.gemma_add_rms_norm(x, r, w, 1e-6, backend=backend)
    assert out.dtype == dtype and new.dtype == r.dtype
    summed = (x.double() + r.double()).to(r.dtype)
    assert torch.equal(new, summed)
    assert_close(out, formula(summed, w, 1e-6), tolerance("gemma_add_rms_norm", dtype))
    apart = lz.gemma_rms_norm(new, w, 1e-6, backend=backend).to(dtype)
    assert torch.equal(out, apart)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.req("R-API-03", "R-OP-14", "R-TOL-02")
def test_rms_norm_is_the_formula_with_the_eps_and_the_weight_that_are_given(backend, dtype, weighted):
    x, w = draw(3, 5, 40, dtype=dtype), draw(40, dtype=dtype, seed=1) if weighted else None
    wide = torch.ones(40) if w is None else w
    for eps, other in ((1e-6, 0.25), (0.25, 1e-6)):
        out = lz.rms_norm(x, w, eps, backend=backend)
        assert out.dtype == dtype and out.shape == x.shape
        assert_close(out, formula(x, wide, eps, offset=0.0), tolerance("rms_norm", dtype))
        assert not compare(out, formula(x, wide, other, offset=0.0), Tolerance(2e-2, 2e-2)).ok
        if weighted:
            assert not compare(out, formula(x, torch.ones(40), eps, offset=0.0), Tolerance(2e-2, 2e-2)).ok
    assert torch.equal(lz.rms_norm(x, w, backend=backend), lz.rms_norm(x, w, 1e-6, backend=backend))
    assert backend in (None, lz.which("rms_norm", x, w, backend=backend).partition(".")[0])


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("parts", ["both", "weight", "bias", "none"])
@pytest.mark.req("R-API-04", "R-OP-14", "R-TOL-02")
def test_layer_norm_is_the_formula_with_what_is_given_over_the_last_axis(backend, dtype, parts):
    x = draw(3, 5, 40, dtype=dtype) * 0.5 + draw(3, 5, 1, dtype=dtype, seed=3)  # a mean of its own in every row
    w = draw(40, dtype=dtype, seed=1) if parts in ("both", "weight") else None
    b = draw(40, dtype=dtype, seed=2) if parts in ("both", "bias") else None

    def wanted(eps):
        middle = x.double() - x.double().mean(-1, keepdim=True)
        out = middle / (middle.square().mean(-1, keepdim=True) + eps).sqrt()
        out = out if w is None else out * w.double()
        return out if b is None else out + b.double()

    for eps, other in ((1e-5, 0.25), (0.25, 1e-5)):
        out = lz.layer_norm(x, w, b, eps, backend=backend)
        assert out.dtype == dtype and out.shape == x.shape
        assert_close(out, wanted(eps), tolerance("layer_norm", dtype))
        assert not compare(out, wanted(other), Tolerance(2e-2, 2e-2)).ok
    named = lz.layer_norm(x, bias=b, weight=w, backend=backend)
    assert torch.equal(named, lz.layer_norm(x, w, b, 1e-5, backend=backend))
    assert backend in (None, lz.which("layer_norm", x, w, b, backend=backend).partition(".")[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stream_narrower_than_the_activation_is_not_rounded_twice(backend):
    x, r, w = draw(64, 32, dtype=torch.float32), draw(64, 32, dtype=torch.bfloat16, seed=1), torch.zeros(32)
    out, new = lz.gemma_add_rms_norm(x, r, w, 1e-6, backend=backend)
    assert (out.dtype, new.dtype) == (torch.float32, torch.bfloat16)
    assert_close(out, formula(new, w, 1e-6), tolerance("gemma_add_rms_norm", "float32"))


def test_small_weights_survive_in_bfloat16():
    """1 + 2^-8 is 1 in bfloat16: the sum is taken wider, and then decides how the product is rounded."""
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    x[0, ::2] = 3.0
    for backend in BACKENDS:
        plain = lz.gemma_rms_norm(x, torch.zeros(64, dtype=torch.bfloat16), 0.0, backend=backend)
        nudged = lz.gemma_rms_norm(x, torch.full((64,), 2.0**-8, dtype=torch.bfloat16), 0.0, backend=backend)
        assert not torch.equal(plain, nudged)


NORMS = {
    "rms_norm": lambda x, w, b: lz.rms_norm(x, w, b),
    "add_rms_norm": lambda x, w, b: lz.add_rms_norm(x, torch.zeros_like(x), w, b)[0],
    "layer_norm": lambda x, w, b: lz.layer_norm(x, w, None, b),
    "gemma_rms_norm": lambda x, w, b: lz.gemma_rms_norm(x, w, b),
    "gemma_add_rms_norm": lambda x, w, b: lz.gemma_add_rms_norm(x, torch.zeros_like(x), w, b)[0],
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_activations_and_weights_of_different_dtypes(name, dtype, weight_dtype):
    x, w = draw(4, 48, dtype=dtype).requires_grad_(), draw(48, dtype=weight_dtype, seed=1).requires_grad_()
    out = NORMS[name](x, w, 1e-6)
    assert out.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    if name == "layer_norm":
        want = (wide[0] - wide[0].mean(-1, keepdim=True)) / (wide[0].var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        want = want * wide[1]
    else:
        want = formula(*wide, 1e-6, offset=1.0 if name.startswith("gemma") else 0.0)
    assert_close(out, want, tolerance(name, dtype))
    cotangent = draw(4, 48, seed=2).to(dtype)
    got = torch.autograd.grad(out, (x, w), cotangent)
    assert [g.dtype for g in got] == [dtype, weight_dtype]
    exact = torch.autograd.grad(want, wide, cotangent.double())
    for found, true in zip(got, exact, strict=True):
        assert_close(found, true, tolerance("gradient", found.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-OP-14")
def test_gradients_are_those_of_the_formula(backend, dtype):
    x, r = (draw(3, 5, 32, dtype=dtype, seed=s).requires_grad_() for s in (0, 1))
    w = (draw(32, seed=2) * 0.3).to(dtype).requires_grad_()
    outs = lz.gemma_add_rms_norm(x, r, w, 1e-5, backend=backend)
    cotangents = [draw(3, 5, 32, seed=s).to(dtype) for s in (3, 4)]
    got = torch.autograd.grad(outs, (x, r, w), cotangents)
    wide = [t.detach().double().requires_grad_() for t in (x, r, w)]
    # the stream is rounded on the way; the gradient is that of the rounded one
    total = wide[0] + wide[1]
    rounded = total + (total.detach().to(dtype).double() - total.detach())
    exact = torch.autograd.grad((formula(rounded, wide[2], 1e-5), total), wide, [c.double() for c in cotangents])
    # a weight's gradient sums fifteen rows that were each rounded to the dtype: by the row for gradients
    assert_close(got, exact, tolerance("gradient", dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_gradcheck(backend):
    x, r, w = (draw(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 5), (2, 5), (5,)]))
    assert torch.autograd.gradcheck(lambda *t: lz.gemma_rms_norm(*t, 1e-6, backend=backend), (x, w))
    assert torch.autograd.gradcheck(lambda *t: lz.gemma_add_rms_norm(*t, 1e-6, backend=backend), (x, r, w))


@pytest.mark.req("R-OP-15")
def test_the_fused_kernel_runs_where_it_can_and_the_reference_takes_over_when_it_fails(lab):
    x, w = draw(3, 16, dtype=torch.float32), draw(16, dtype=torch.float32, seed=1)
    _, ran = lab.run(lz.gemma_rms_norm, x, w)
    assert ran == ["torch.gemma_rms_norm.native"]
    lab.faults["torch.gemma_rms_norm.native"] = RuntimeError("no fused kernel for this device")
    out, ran = lab.run(lz.gemma_rms_norm, x * 2, w)
    assert ran == ["reference.gemma_rms_norm.plain"]
    assert_close(out, formula(x * 2, w, 1e-6), tolerance("gemma_rms_norm", "float32"))
    lab.use(only=True)
    _, ran = lab.run(lz.gemma_add_rms_norm, x, x, w)
    assert ran == ["reference.gemma_add_rms_norm.plain"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: lz.gemma_rms_norm(draw(2, 8), draw(4)), "SHAPE_INVALID"),
        (lambda: lz.gemma_rms_norm(draw(2, 8), None), "TYPE_INVALID"),
        (lambda: lz.gemma_rms_norm(torch.ones(2, 8, dtype=torch.int64), draw(8)), "DTYPE_UNSUPPORTED"),
        (lambda: lz.gemma_rms_norm(draw(2, 8), draw(8), "small"), "TYPE_INVALID"),
        (lambda: lz.gemma_add_rms_norm(draw(2, 8), draw(3, 8), draw(8)), "SHAPE_INVALID"),
        (lambda: lz.gemma_add_rms_norm(draw(2, 8), None, draw(8)), "TYPE_INVALID"),
    ],
)
def test_what_does_not_fit_is_refused(call, code):
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code


# -- properties ------------------------------------------------------------------------------------
widths, seeds = st.integers(1, 33), st.integers(0, 99)
scales = st.sampled_from([1e-4, 0.5, 3.0, 1e4])


@given(st.sampled_from(sorted(NORMS)), st.integers(1, 5), widths, scales, seeds, st.booleans())
@settings(max_examples=60, deadline=None)
@pytest.mark.req("R-OP-14")
def test_without_eps_the_scale_of_a_row_does_not_matter(name, rows, width, scale, seed, strided):
    x = draw(rows, 2 * width, seed=seed)[:, ::2] if strided else draw(rows, width, seed=seed)
    if name == "layer_norm":
        x = x + torch.arange(width)  # a row of one value has no direction left once centred
        if width == 1:
            return
    w = draw(width, seed=seed + 1)
    one, other = NORMS[name](x, w, 0.0), NORMS[name](x * scale, w, 0.0)
    assert_close(other, one, tolerance(name, "float64"))
    assert torch.equal(one, NORMS[name](x, w, 0.0))
    assert_close(NORMS[name](-x, w, 0.0), -one, tolerance(name, "float64"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_values(backend, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4  # a denormal
    x = torch.stack([torch.full((16,), v, dtype=dtype) for v in (0.0, tiny, 1e4, -1e4)])
    x = torch.cat((x, draw(2, 16, dtype=dtype)))
    x[4, 3], x[5, 7] = math.nan, math.inf
    out = lz.gemma_rms_norm(x, torch.zeros(16, dtype=dtype), 1e-6, backend=backend)
    assert torch.count_nonzero(out[0]) == 0
    assert_close(out[:4], formula(x[:4], torch.zeros(16), 1e-6), tolerance("gemma_rms_norm", dtype))
    assert out[4].isnan().all() and out[5].isnan().any() and not out[5, 0].isinf()
