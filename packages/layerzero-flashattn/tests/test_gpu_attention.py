"""The three FlashAttention backends on a GPU, each where its library is installed, against the reference in float64.

Every combination compiles a kernel of FlashAttention 4, so cases are chosen pairwise rather than all with all.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.attention import attention as reference
from layerzero.backends.reference.varlen import paged_attention as reference_paged
from layerzero.backends.reference.varlen import varlen_attention as reference_varlen
from layerzero.numerics import Tolerance, assert_close, tolerance

# The vendor warns while it compiles; that is not ours to fail on.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LIBRARIES = {
    "fa2": "flash_attn.flash_attn_interface",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute.interface",
}
HALF, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(scope="module", params=LIBRARIES)
def kernels(request: pytest.FixtureRequest) -> Any:
    """The adapters of one generation, with its name; skipped where the library is not there or not for this GPU."""
    if request.param == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for SM 9.0")
    pytest.importorskip(LIBRARIES[request.param], reason=f"{LIBRARIES[request.param]} is not installed")
    found = importlib.import_module(f"layerzero_flashattn.{request.param}.kernels")
    found.generation = request.param
    return found


def paged_kernels(kernels: Any) -> Any:
    return importlib.import_module("layerzero_flashattn.fa4.paged") if kernels.generation == "fa4" else kernels


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def inputs(batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Any:
    return (
        randn(batch, q_len, heads, dim, dtype=dtype),
        randn(batch, k_len, kv_heads, dim, seed=1, dtype=dtype),
        randn(batch, k_len, kv_heads, dim, seed=2, dtype=dtype),
    )


def truth(q: Any, k: Any, v: Any, causal: Any, scale: Any, window: Any, softcap: Any) -> Any:
    wide = (t.transpose(1, 2).double() for t in (q, k, v))
    out, lse = reference(*wide, None, 0.0, causal, scale, window, softcap, None, True)
    return out.transpose(1, 2), lse


FORWARD = {
    "prefill": ((1, 512, 512, 8, 2, 128, BF16), "bottom_right", None, None),
    "prefill_d64": ((2, 300, 300, 4, 4, 64, HALF), "bottom_right", None, None),
    "prefill_d256": ((1, 257, 257, 2, 1, 256, BF16), "bottom_right", None, None),
    "d96_full": ((1, 130, 200, 6, 2, 96, HALF), False, None, None),
    "decode": ((4, 1, 1000, 8, 2, 128, BF16), "bottom_right", None, None),
    "more_queries_than_keys": ((2, 96, 40, 4, 2, 64, HALF), "bottom_right", None, None),
    "window": ((1, 200, 333, 4, 2, 64, HALF), False, None, (16, 5)),
    "window_left": ((1, 200, 333, 4, 2, 64, HALF), False, None, (16, -1)),
    "window_causal": ((1, 300, 300, 4, 2, 128, BF16), "bottom_right", None, (64, 0)),
    "negative_scale": ((1, 64, 64, 4, 2, 64, HALF), "bottom_right", -0.25, None),
    "zero_scale": ((1, 64, 64, 4, 2, 64, HALF), "bottom_right", 0.0, None),
}


@pytest.mark.req("R-BK-FA-05")
@pytest.mark.req("R-BK-FA4-05")
@pytest.mark.parametrize("case", FORWARD)
def test_forward_and_lse_match_the_reference(kernels: Any, case: str) -> None:
    sizes, causal, scale, window = FORWARD[case]
    q, k, v = inputs(*sizes)
    expected, expected_lse = truth(q, k, v, causal, scale, window, None)
    with torch.no_grad():
        for _ in range(2):  # the second call goes through what the first has recorded
            out, lse = kernels.attention(q, k, v, None, 0.0, causal, scale, window, None, None, True)
            assert_close(out, expected, tolerance("attention", q.dtype))
            assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
            assert_close(
                lse.masked_fill(lse == -torch.inf, 0.0),
                expected_lse.masked_fill(expected_lse == -torch.inf, 0.0),
                tolerance("attention", q.dtype),
            )
        if case in ("prefill", "decode"):  # another kernel to compile, so not for all
            alone = kernels.attention(q, k, v, None, 0.0, causal, scale, window, None, None, False)
            assert_close(alone, expected, tolerance("attention", q.dtype))


@pytest.mark.req("R-BK-FA-04")
def test_other_layouts_are_read_where_they_lie(kernels: Any) -> None:
    """BHSD comes as a transposed view, a fused projection as slices of one tensor: same result, same memory."""
    packed = randn(2, 128, 3 * 4 * 64, dtype=BF16).view(2, 128, 3, 4, 64)
    q, k, v = packed.unbind(2)
    with torch.no_grad():
        whole = kernels.attention(*(t.contiguous() for t in (q, k, v)), None, 0.0, False, None, None, None, None, False)
        sliced = kernels.attention(q, k, v, None, 0.0, False, None, None, None, None, False)
        heads_first = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        swapped = kernels.attention(*heads_first, None, 0.0, False, None, None, None, None, False)
    assert torch.equal(whole, sliced) and torch.equal(whole, swapped)


def test_a_growing_cache_and_an_expanded_one_give_the_right_result(kernels: Any) -> None:
    query = randn(2, 1, 8, 128, dtype=BF16)
    with torch.no_grad():
        for length in (100, 101, 102, 513):
            key, value = (randn(2, length, 2, 128, seed=seed, dtype=BF16) for seed in (1, 2))
            out = kernels.attention(query, key, value, None, 0.0, False, None, None, None, None, False)
            assert_close(out, truth(query, key, value, False, None, None, None)[0], tolerance("attention", BF16))
        shared = [randn(1, 200, 2, 128, seed=seed, dtype=BF16).expand(2, -1, -1, -1) for seed in (3, 4)]
        out = kernels.attention(query, *shared, None, 0.0, False, None, None, None, None, False)
    assert_close(out, truth(query, *shared, False, None, None, None)[0], tolerance("attention", BF16))


def test_softcap_of_two_values(kernels: Any) -> None:
    q, k, v = inputs(1, 256, 256, 4, 2, 64, HALF)
    with torch.no_grad():
        for cap in (5.0, 30.0):
            out = kernels.attention(q, k, v, None, 0.0, "bottom_right", None, None, cap, None, False)
            assert_close(out, truth(q, k, v, "bottom_right", None, None, cap)[0], tolerance("attention", HALF))


BACKWARD = {
    "causal_gqa": ((1, 256, 256, 4, 2, 64, HALF), "bottom_right", None),
    "d128": ((1, 200, 300, 2, 2, 128, BF16), "bottom_right", None),
    "window": ((1, 200, 200, 2, 2, 64, HALF), False, (32, 8)),
}


@pytest.mark.parametrize(
    ("case", "deterministic"),
    [("causal_gqa", False), ("causal_gqa", True), ("d128", False), ("window", False), ("window", True)],
)
def test_gradients_match_the_reference(kernels: Any, case: str, deterministic: bool) -> None:
    sizes, causal, window = BACKWARD[case]
    mine = [t.requires_grad_() for t in inputs(*sizes)]
    wide = [t.detach().double().requires_grad_() for t in mine]
    run = kernels.deterministic_attention if deterministic else kernels.attention
    out = run(*mine, None, 0.0, causal, None, window, None, None, False)
    grad = randn(*out.shape, seed=5, dtype=out.dtype)
    found = torch.autograd.grad(out, mine, grad, retain_graph=True)
    again = torch.autograd.grad(out, mine, grad)
    wanted = torch.autograd.grad(truth(*wide, causal, None, window, None)[0], wide, grad.double())
    bounds = tolerance("attention", out.dtype)
    for one, two, right in zip(found, again, wanted, strict=True):
        assert_close(one, right, Tolerance(bounds.rtol * 20, bounds.atol * 20))  # the kit's factor for gradients
        assert not deterministic or torch.equal(one, two)


def test_the_gradient_of_the_log_sum_exp_is_right(kernels: Any) -> None:
    """Only FlashAttention 4 has one."""
    if kernels.generation != "fa4":
        pytest.skip("no gradient through the log-sum-exp")
    mine = [t.requires_grad_() for t in inputs(1, 256, 256, 4, 2, 64, HALF)]
    wide = [t.detach().double().requires_grad_() for t in mine]
    found = kernels.attention(*mine, None, 0.0, "bottom_right", None, None, None, None, True)
    right = truth(*wide, "bottom_right", None, None, None)
    weights = [randn(*item.shape, seed=6, dtype=item.dtype) for item in found]
    got = torch.autograd.grad(found, mine, weights)
    wanted = torch.autograd.grad(right, wide, [item.double() for item in weights])
    for one, three in zip(got, wanted, strict=True):
        assert_close(one, three, Tolerance(2e-2, 2e-2))


@pytest.mark.parametrize("causal", ["bottom_right", False])
def test_packed_sequences_match_the_reference(kernels: Any, causal: Any) -> None:
    offsets = torch.tensor([0, 3, 3, 150, 400], device="cuda", dtype=torch.int64)
    keys = torch.tensor([0, 10, 20, 20, 300], device="cuda", dtype=torch.int64)  # one sequence has no keys
    q, k, v = randn(400, 4, 64), randn(300, 2, 64, seed=1), randn(300, 2, 64, seed=2)
    expected, expected_lse = reference_varlen(
        q.double(), k.double(), v.double(), offsets, keys, 250, 280, causal, None, None, None, None, True
    )
    with torch.no_grad():
        out, lse = kernels.varlen_attention(q, k, v, offsets, keys, 250, 280, causal, None, None, None, None, True)
    assert_close(out, expected, tolerance("attention", HALF))
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    alive = expected_lse != -torch.inf
    assert_close(lse[alive], expected_lse[alive], tolerance("attention", HALF))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_paged_cache_matches_the_reference(kernels: Any, prefill: bool) -> None:
    """What lies in a page past the end of its sequence is not a number, and must not be seen."""
    page = 256 if kernels.generation == "fa2" else 16
    cache = [torch.full((48, page, 2, 64), torch.nan, device="cuda", dtype=HALF) for _ in range(2)]
    tables = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(3, 16).to("cuda", torch.int32)
    lengths, queries = [5, 33, 100], [3, 1, 40] if prefill else [1, 1, 1]
    for which, pages in enumerate(cache):
        for row, length in enumerate(lengths):
            spots = torch.arange(length, device="cuda")
            pages[tables[row, spots // page].long(), spots % page] = randn(length, 2, 64, seed=10 * which + row)
    lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    new = torch.tensor(queries, device="cuda", dtype=torch.int32) if prefill else None
    batch = lz.paged_batch(tables, lens, query_lens=new)
    query = randn(sum(queries), 4, 64)
    run = paged_kernels(kernels).paged_prefill if prefill else paged_kernels(kernels).paged_decode
    with torch.no_grad():
        out, lse = run(query, *cache, batch, None, None, None, None, True, "NHD")
    clean = (torch.nan_to_num(pages).double() for pages in cache)
    expected, expected_lse = reference_paged(query.double(), *clean, batch, None, None, None, None, True, "NHD")
    assert_close(out, expected, tolerance("attention", HALF))
    assert_close(lse, expected_lse, tolerance("attention", HALF))


@pytest.mark.req("R-BK-FA-04")
def test_a_captured_call_can_be_replayed(kernels: Any) -> None:
    q, k, v = inputs(1, 512, 512, 8, 2, 128, BF16)
    call = (q, k, v, None, 0.0, "bottom_right", None, None, None, None, False)
    with torch.no_grad():
        kernels.attention(*call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.attention(*call)
        for seed in (7, 8):
            q.copy_(randn(*q.shape, seed=seed, dtype=BF16))
            graph.replay()
            assert_close(out, truth(q, k, v, "bottom_right", None, None, None)[0], tolerance("attention", BF16))


def test_the_known_answers_are_given(kernels: Any) -> None:
    from layerzero_flashattn.health import self_test

    report = self_test("flashattn" + kernels.generation[-1])
    assert report.ok, report.detail
