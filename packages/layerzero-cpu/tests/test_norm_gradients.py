"""Gradients of the norms in float32, where terms of both signs cancel: along a row and over the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.numerics import assert_close, tolerance
from layerzero_cpu import norm

EPS = 1e-2


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


OURS = {
    "rms_norm": lambda a, b: norm.rms_norm(a, b, EPS),
    "layer_norm": lambda a, b: norm.layer_norm(a, b, None, EPS),
}
PLAIN = {"rms_norm": rms, "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:], b, None, EPS)}


def gradients(call, x, w, g):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    return torch.autograd.grad(call(x, w), (x, w), g)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("rows", [1, 3, 25, 70, 300])
def test_float32_gradients_are_those_of_float64_rounded_once(kind, rows):
    for width in (3, 31, 128, 261):
        torch.manual_seed(rows * 1000 + width)
        x, g, w = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
        # rows come twice, the second time with the opposite gradient but for one part in a thousand: sums nearly cancel
        x, g = torch.cat((x, x)), torch.cat((g, -g * (1 - 2**-10)))
        got = gradients(OURS[kind], x, w, g)
        right = gradients(PLAIN[kind], x.double(), w.double(), g.double())
        for one, two in zip(got, right, strict=True):
            assert one.dtype is torch.float32
            assert_close(one, two, tolerance("layer_norm", torch.float32))
            # half a place of the result, and a little for what summing in double itself leaves
            assert bool(((one.double() - two).abs() <= 6.0e-8 * two.abs() + 1e-12).all())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_larger_ones_are_computed_in_float32_and_summed_over_rows_in_float64(kind):
    rows, width = 1100, 257  # more than the kernel computes in double
    torch.manual_seed(3)
    x, g, w = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    got, right = gradients(OURS[kind], x, w, g), gradients(PLAIN[kind], x.double(), w.double(), g.double())
    assert_close(got[0], right[0], tolerance("", torch.float32))
    # what is left is the rounding of the terms: no further off than torch's own float32, whose sums round as well
    theirs = gradients(PLAIN[kind], x, w, g)[1]
    ours, other = (float((item.double() - right[1]).pow(2).mean().sqrt()) for item in (got[1], theirs))
    assert ours <= 1.25 * other, (ours, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_keep_their_sums_in_float32(dtype):
    torch.manual_seed(1)
    x, g, w = (torch.randn(*shape).to(dtype) for shape in ((40, 65), (40, 65), (65,)))
    got = gradients(lambda a, b: norm.layer_norm(a, b, None, EPS), x, w, g)
    right = gradients(lambda a, b: F.layer_norm(a, (65,), b, None, EPS), x.double(), w.double(), g.double())
    for one, two in zip(got, right, strict=True):
        assert one.dtype is dtype
        assert_close(one, two, tolerance("layer_norm", dtype))


def test_sums_of_the_wrong_kind_are_refused():
    from layerzero_cpu.library import native

    x, sums = torch.randn(2, 8), torch.zeros(1, 8)
    with pytest.raises(ValueError, match="float64 for float32"):
        native.rms_norm_grad(x, None, x, None, 0.0, EPS, torch.empty_like(x), sums)
    with pytest.raises(ValueError, match="float64 for float32"):
        native.layer_norm_grad(x, x, None, EPS, torch.empty_like(x), sums, sums)


ASKED = {
    "backend": lambda: None,
    "lock": lambda: lz.lock("add_rms_norm", "cpu.add_rms_norm.rows"),
    "prefer": lambda: lz.configure(prefer=["cpu"]),
}


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("how", ASKED)
def test_a_kernel_that_is_asked_for_keeps_its_own_backward_in_a_compiled_graph(how, monkeypatch):
    """Two results and three gradients; a result that is used alone; a weight that needs none."""
    passes = []
    own = norm._AddNorm.backward
    monkeypatch.setattr(norm._AddNorm, "backward", staticmethod(lambda *args: (passes.append(1), own(*args))[1]))
    named = "cpu" if how == "backend" else None
    torch.manual_seed(0)
    x, residual = torch.randn(2, 6, 32).unbind()
    weight = torch.randn(32)

    def step(x, residual, weight, whole):
        normed, stream = lz.add_rms_norm(x * 2, residual, weight, EPS, backend=named)
        return (normed * stream).sum() if whole else normed.square().sum()

    def plain(x, residual, weight, whole):
        stream = x * 2 + residual
        return (rms(stream, weight) * stream).sum() if whole else rms(stream, weight).square().sum()

    def derived(call, items, *rest):
        items = [item.detach().clone().requires_grad_() for item in items]
        return torch.autograd.grad(call(*items, *rest), items)

    torch._dynamo.reset()
    try:
        ASKED[how]()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for whole in (True, False):
            got = derived(compiled, (x, residual, weight), whole)
            right = derived(plain, (x.double(), residual.double(), weight.double()), whole)
            for one, two in zip(got, right, strict=True):
                assert_close(one, two, tolerance("layer_norm", torch.float32))
        got = derived(lambda x: compiled(x, residual, weight, True), (x,))
        right = derived(lambda x: plain(x, residual.double(), weight.double(), True), (x.double(),))
        assert_close(got[0], right[0], tolerance("layer_norm", torch.float32))
        assert len(passes) == 3
        if how == "backend":
            return
        lz.reset()
        derived(compiled, (x, residual, weight), True)
        assert len(passes) == 3  # nobody asks any more: plain torch is written out and derived
    finally:
        lz.reset()
        torch._dynamo.reset()
