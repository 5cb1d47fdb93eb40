"""The reference norms against torch's own in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from layerzero.backends.reference.norm import add_rms_norm, layer_norm, rms_norm
from layerzero.numerics import assert_close, tolerance

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 1024)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_rms_norm_matches_torch(dtype, shape, weighted):
    x = draw(*shape, dtype=dtype)
    w = draw(shape[-1], dtype=dtype, seed=1) if weighted else None
    out = rms_norm(x, w, 1e-6)
    assert out.dtype == dtype
    want = F.rms_norm(x.double(), (shape[-1],), None if w is None else w.double(), 1e-6)
    assert_close(out, want, tolerance("rms_norm", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["both", "weight", "none"])
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_layer_norm_matches_torch(dtype, parts):
    x = draw(3, 7, 256, dtype=dtype) + 3.0
    w = draw(256, dtype=dtype, seed=1) if parts != "none" else None
    b = draw(256, dtype=dtype, seed=2) if parts == "both" else None
    want = F.layer_norm(x.double(), (256,), *(None if t is None else t.double() for t in (w, b)), 1e-5)
    out = layer_norm(x, w, b, 1e-5)
    assert out.dtype == dtype
    assert_close(out, want, tolerance("layer_norm", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_add_rms_norm_is_the_sum_then_the_norm(dtype):
    x, r, w = draw(4, 128, dtype=dtype), draw(4, 128, dtype=dtype, seed=1), draw(128, dtype=dtype, seed=2)
    y, stream = add_rms_norm(x, r, w, 1e-6)
    assert torch.equal(stream, x + r)
    assert_close(y, F.rms_norm((x + r).double(), (128,), w.double(), 1e-6), tolerance("add_rms_norm", dtype))


@pytest.mark.req("R-OP-14")
def test_mixed_dtypes_follow_the_activation_and_the_residual_keeps_its_own():
    x, w = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.float32, seed=1)
    out = rms_norm(x, w, 1e-6)
    assert out.dtype == torch.bfloat16
    assert_close(out, F.rms_norm(x.double(), (64,), w.double(), 1e-6), tolerance("rms_norm", "bf16"))
    assert layer_norm(x, w, None, 1e-5).dtype == torch.bfloat16
    residual = draw(4, 64, dtype=torch.float32, seed=2)
    y, stream = add_rms_norm(x, residual, w, 1e-6)
    assert (y.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stream, x.float() + residual)


def test_inputs_stay_untouched():
    x, r, w = draw(2, 8), draw(2, 8, seed=1), draw(8, seed=2)
    copies = [t.clone() for t in (x, r, w)]
    add_rms_norm(x, r, w, 1e-6)
    layer_norm(x, w, w, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip((x, r, w), copies, strict=True))


@pytest.mark.parametrize("norm", [lambda x: rms_norm(x, None, 1e-6), lambda x: layer_norm(x, None, None, 1e-6)])
def test_zero_rows_give_zeros_and_nan_stays_in_its_row(norm):
    x = draw(3, 16, dtype=torch.float32)
    x[0] = 0.0
    x[1, 4] = math.nan
    out = norm(x)
    assert torch.count_nonzero(out[0]) == 0
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


def test_half_precision_does_not_overflow_in_the_square():
    x = torch.full((1, 32), 60000.0, dtype=torch.float16)
    assert torch.allclose(rms_norm(x, None, 1e-6), torch.ones_like(x))


def test_eps_is_inside_the_root():
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    assert_close(rms_norm(x, None, 3e-6), torch.full_like(x, 0.5), tolerance("rms_norm", "float64"))


def test_gradients_pass_gradcheck():
    x, r, w, b = (draw(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 5), (2, 5), (5,), (5,)]))
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, 1e-6), (x, w))
    assert torch.autograd.gradcheck(lambda *t: add_rms_norm(*t, 1e-6), (x, r, w))
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, 1e-5), (x, w, b))
