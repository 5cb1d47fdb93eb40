"""`torch.ops.layerzero.varlen_attention*`: opcheck, fake shapes, one graph, gradients, vmap, subclasses."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

LENS_Q, LENS_K = (3, 0, 5, 1), (3, 4, 7, 0)
BOUND = tolerance("attention", torch.float32)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


CU_Q, CU_K = offsets(LENS_Q), offsets(LENS_K)


def qkv(grad=False):
    gen = torch.Generator().manual_seed(0)
    shapes = ((sum(LENS_Q), 4, 8), (sum(LENS_K), 2, 8), (sum(LENS_K), 2, 8))
    return [torch.randn(shape, generator=gen).requires_grad_(grad) for shape in shapes]


CALLS = {
    "plain": {},
    "bounds": {"max_seqlen_q": 5, "max_seqlen_k": 7},
    "top left": {"is_causal": True, "scale": 0.3},
    "options": {"is_causal": "bottom_right", "window": 4, "softcap": 5.0, "alibi_slopes": torch.rand(4)},
    "slopes per sequence": {"alibi_slopes": torch.rand(4, 4), "window": (2, 1)},
}
SCHEMA = {
    "varlen_attention": (None, None, "bottom_right", None, [4, 0], None, torch.rand(4), None),
    "varlen_attention_lse": (5, 7, "none", 0.3, None, None, None, None),
}


@pytest.mark.req("R-PT-01", "R-PT-03")
@pytest.mark.parametrize("name", SCHEMA)
@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_opcheck(name, grad):
    op = getattr(torch.ops.layerzero, name).default
    torch.library.opcheck(op, (*qkv(grad), CU_Q, CU_K, *SCHEMA[name]))


@pytest.mark.req("R-PT-02")
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_eager_numbers(name):
    def layer(q, k, v, lse=False):
        return lz.varlen_attention(q, k, v, CU_Q, CU_K, return_lse=lse, **CALLS[name])

    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        assert torch.equal(compiled(*qkv()), layer(*qkv()))
        got, want = compiled(*qkv(), lse=True), layer(*qkv(), lse=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counter.frame_count == 2


@pytest.mark.req("R-PT-02", "R-PT-04")
@pytest.mark.parametrize("name", ["plain", "options"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_one_graph_with_eager_gradients(name, backend):
    def layer(q, k, v):
        return lz.varlen_attention(q, k, v, CU_Q, CU_K, **CALLS[name])

    inputs, others = qkv(True), qkv(True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    compiled(*inputs).square().sum().backward()
    layer(*others).square().sum().backward()
    for a, b in zip(inputs, others, strict=True):
        assert_close(a.grad, b.grad, BOUND)


@pytest.mark.req("R-PT-04")
def test_the_opaque_op_has_gradients_of_its_own():
    for name, rest in SCHEMA.items():
        inputs, others = qkv(True), qkv(True)
        made = getattr(torch.ops.layerzero, name)(*inputs, CU_Q, CU_K, *rest)
        causal = {"none": False, "bottom_right": "bottom_right"}[rest[2]]
        want = lz.varlen_attention(
            *others, CU_Q, CU_K, is_causal=causal, scale=rest[3], window=rest[4] and tuple(rest[4]),
            alibi_slopes=rest[6], return_lse=name.endswith("lse"),
        )  # fmt: skip
        for found in (made, want):
            parts = found if isinstance(found, tuple) else (found,)
            sum(p.masked_fill(p == -torch.inf, 0.0).square().sum() for p in parts).backward()
        for a, b in zip(inputs, others, strict=True):
            assert_close(a.grad, b.grad, BOUND)


def test_changing_lengths_recompile_little():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v, cu: lz.varlen_attention(q, k, v, cu, cu, is_causal=True), fullgraph=True, backend=counter
    )
    with torch.no_grad():
        for lens in ((3, 5), (4, 9), (6, 2), (8, 8), (1, 20)):
            cu = offsets(lens)
            q, k, v = (torch.randn(sum(lens), 2, 8) for _ in range(3))
            assert torch.equal(compiled(q, k, v, cu), lz.varlen_attention(q, k, v, cu, cu, is_causal=True))
    assert counter.frame_count <= 2


def test_fake_tensors_know_the_shapes():
    plain = [*qkv(), CU_Q, CU_K]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in plain]
        out, lse = lz.varlen_attention(*fakes, return_lse=True)
    assert out.shape == (9, 4, 8) and lse.shape == (9, 4) and lse.dtype is torch.float32


def test_under_func_transforms():
    q, k, v = qkv()

    def loss(q):
        return lz.varlen_attention(q, k, v, CU_Q, CU_K, is_causal="bottom_right").square().sum()

    (want,) = torch.autograd.grad(loss(leaf := q.clone().requires_grad_()), leaf)
    assert_close(torch.func.grad(loss)(q), want, BOUND)
    batched = torch.stack((q, 2 * q))
    got = torch.vmap(lambda t: lz.varlen_attention(t, k, v, CU_Q, CU_K))(batched)
    assert_close(got, torch.stack([lz.varlen_attention(t, k, v, CU_Q, CU_K) for t in batched]), BOUND)


def test_autocast_in_a_graph():
    def layer(q, k, v):
        return lz.varlen_attention(q, k, v, CU_Q, CU_K)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.compile(layer, fullgraph=True, backend="eager")(*qkv())
        want = layer(*qkv())
    assert got.dtype is want.dtype is torch.bfloat16
    assert torch.equal(got, want)
