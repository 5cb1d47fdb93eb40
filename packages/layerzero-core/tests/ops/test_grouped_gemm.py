"""`lz.grouped_gemm` against a NumPy loop over the groups: every kernel, dtype, empty groups, gradients, bad sizes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

# torch says so once, on a CPU without bfloat16 instructions
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

KERNELS = ("reference.grouped_gemm.plain", "torch.grouped_gemm.segments", "torch.grouped_gemm.grouped_cpu")
EXAMPLES = 1_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 25
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = [(3, 5, 4), (0, 5, 0, 3, 0), (6,), (0, 0, 7), (0, 0), (2, 1)]


def draw(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def oracle(x, weights, sizes):
    a, w = x.detach().double().numpy(), weights.detach().double().numpy()
    out = np.zeros((a.shape[0], w.shape[1]))
    start = 0
    for group, size in enumerate(sizes):
        for row in range(start, start + size):
            out[row] = w[group] @ a[row]
        start += size
    return torch.from_numpy(out)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.req("R-MOE-02", "R-TOL-03")
def test_each_group_meets_its_own_weight(kernel, dtype, sizes):
    for left, index in ((0, torch.int64), (2, torch.int32)):
        rows = sum(sizes) + left
        if not rows:
            continue
        x, weights = draw(rows, 48, dtype=dtype), draw(len(sizes), 40, 48, dtype=dtype, scale=0.1)
        out = lz.grouped_gemm(x, weights, torch.tensor(sizes, dtype=index), backend=kernel)
        assert out.dtype == dtype and out.shape == (rows, 40)
        assert_close(out, oracle(x, weights, sizes), tolerance("grouped_gemm", dtype, k=48))
        assert torch.equal(out[sum(sizes) :], torch.zeros(left, 40, dtype=dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.req("R-MOE-02")
def test_gradients_are_those_of_separate_products(kernel, dtype):
    if dtype == torch.float64 and kernel.endswith("grouped_cpu"):
        pytest.skip("F.grouped_mm has no float64")
    sizes = (3, 0, 5)
    x, weights = draw(10, 16, dtype=dtype).requires_grad_(), draw(3, 24, 16, dtype=dtype, scale=0.2).requires_grad_()
    slope = draw(10, 24, dtype=dtype, seed=5, scale=0.2)
    out = lz.grouped_gemm(x, weights, torch.tensor(sizes), backend=kernel)
    got = torch.autograd.grad(out, (x, weights), slope)
    wide_x, wide_w = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    parts = [p @ w.mT for p, w in zip(wide_x.split([*sizes, 2])[:3], wide_w, strict=True)]
    want = torch.autograd.grad(torch.cat(parts), (wide_x, wide_w), slope[:8].double())
    assert_close(list(got), list(want), tolerance("gradient", dtype))
    assert torch.equal(got[0][8:], torch.zeros(2, 16, dtype=dtype))  # rows of no group
    assert torch.equal(got[1][1], torch.zeros(24, 16, dtype=dtype))  # a group without rows


@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_without_any_row_have_a_gradient_of_zero(kernel):
    x, weights = draw(4, 8, dtype=torch.float32).requires_grad_(), draw(2, 8, 8, dtype=torch.float32).requires_grad_()
    lz.grouped_gemm(x, weights, torch.tensor([0, 0]), backend=kernel).sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 8)) and torch.equal(weights.grad, torch.zeros(2, 8, 8))


@pytest.mark.parametrize("kernel", KERNELS[:2])
def test_gradcheck(kernel):
    x, weights = draw(5, 3).requires_grad_(), draw(3, 2, 3).requires_grad_()
    sizes = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(lambda a, w: lz.grouped_gemm(a, w, sizes, backend=kernel), (x, weights))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_one_group_holds_stays_there(kernel):
    """A NaN in a weight nobody uses, in a row of no group, or in another group's row reaches nobody else."""
    x, weights = draw(6, 8, dtype=torch.float32), draw(3, 8, 8, dtype=torch.float32)
    weights[1], x[0, 3], x[5] = float("nan"), float("nan"), float("inf")
    x.requires_grad_(), weights.requires_grad_()
    out = lz.grouped_gemm(x, weights, torch.tensor([2, 0, 3]), backend=kernel)
    assert out[0].isnan().all() and out[1:5].isfinite().all() and torch.equal(out[5], torch.zeros(8))
    out[1:].sum().backward()
    assert x.grad.isfinite().all() and weights.grad[2].isfinite().all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    left=st.integers(0, 3),
    n=st.integers(1, 17),
    k=st.integers(1, 17),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(("plain", "step", "transposed")),
    index=st.sampled_from((torch.int32, torch.int64)),
)
def test_any_shape_and_stride(sizes, left, n, k, dtype, how, index):
    rows = sum(sizes) + left
    x, weights = draw(rows, k, dtype=dtype), draw(len(sizes), n, k, dtype=dtype, scale=0.2)
    lying_x, lying_w = x, weights
    if how == "step":
        lying_x, lying_w = torch.stack((x, x), -1)[..., 0], torch.stack((weights, weights), -1)[..., 0]
    elif how == "transposed":
        lying_x, lying_w = x.mT.contiguous().mT, weights.mT.contiguous().mT
    counts = torch.tensor(sizes, dtype=index)
    results = [lz.grouped_gemm(lying_x, lying_w, counts, backend=b) for b in (None, "reference")]
    for out in results:
        assert_close(out, oracle(x, weights, sizes), tolerance("grouped_gemm", dtype, k=k))
    assert torch.equal(results[0], lz.grouped_gemm(lying_x, lying_w, counts))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(3, 4), (-1, 5), (7, 0)], ids=str)
def test_sizes_that_do_not_fit_are_refused_hot_and_cold(kernel, sizes):
    x, weights = draw(6, 8, dtype=torch.float32), draw(2, 8, 8, dtype=torch.float32)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="group_sizes") as caught:
            lz.grouped_gemm(x, weights, torch.tensor(sizes), backend=kernel)
        assert caught.value.code == "VALUE_INVALID"
        lz.grouped_gemm(x, weights, torch.tensor([3, 3]), backend=kernel)


X, W, S = torch.zeros(4, 8), torch.zeros(2, 5, 8), torch.tensor([2, 2])
BAD = {
    "widths": (lambda: lz.grouped_gemm(torch.zeros(4, 7), W, S), "SHAPE_INVALID"),
    "one size too many": (lambda: lz.grouped_gemm(X, W, torch.tensor([1, 1, 2])), "SHAPE_INVALID"),
    "float sizes": (lambda: lz.grouped_gemm(X, W, torch.tensor([2.0, 2.0])), "DTYPE_UNSUPPORTED"),
    "a list": (lambda: lz.grouped_gemm(X, W, [2, 2]), "TYPE_INVALID"),
    "rank of weights": (lambda: lz.grouped_gemm(X, W[0], S), "RANK_INVALID"),
    "rank of x": (lambda: lz.grouped_gemm(X[None], W, S), "RANK_INVALID"),
    "elsewhere": (lambda: lz.grouped_gemm(X, W, S.to("meta")), "DEVICE_MIXED"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code


def test_the_grouped_product_of_torch_is_taken_where_it_fits():
    x, weights, sizes = draw(6, 16, dtype=torch.float32), draw(2, 8, 16, dtype=torch.float32), torch.tensor([2, 4])
    assert lz.which("grouped_gemm", x, weights, sizes) == "torch.grouped_gemm.grouped_cpu"
    assert lz.which("grouped_gemm", x[:, :12], weights[..., :12], sizes) == "torch.grouped_gemm.segments"
    assert lz.which("grouped_gemm", x.double(), weights.double(), sizes) == "torch.grouped_gemm.segments"
    assert lz.which("grouped_gemm", x[:0], weights, sizes * 0) == "reference.grouped_gemm.plain"
