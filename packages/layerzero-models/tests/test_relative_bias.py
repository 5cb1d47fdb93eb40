"""`lz.relative_bias`: T5's own numbers, Shaw's vectors, and a gradient that reaches the table through attention."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

BOUND = tolerance("attention", torch.float32)


def table(rows, heads, dtype=torch.float32, seed=0):
    return torch.randn(rows, heads, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(rows, cols, heads=4, dim=8, dtype=torch.float32, seed=1):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, rows, dim), (2, heads, cols, dim), (2, heads, cols, dim))
    return [torch.randn(shape, generator=gen).to(dtype) for shape in shapes]


def t5_layer(rows, heads, bidirectional, max_distance):
    """The attention layer of T5, with random weights."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(
        d_model=16, d_kv=4, num_heads=heads, relative_attention_num_buckets=rows,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()


@pytest.mark.req("R-SEL-19", "R-OP-13")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("rows", "max_distance"), [(32, 128), (32, 20), (16, 64), (8, 400)])
def test_the_bias_is_bit_for_bit_that_of_t5(bidirectional, rows, max_distance):
    layer = t5_layer(rows, 4, bidirectional, max_distance)
    weight = layer.relative_attention_bias.weight.detach()
    for q_len, k_len in ((17, 17), (300, 300), (5, 260)):
        want = layer.compute_bias(q_len, k_len).detach()
        offset = 0  # compute_bias counts both from zero
        got = lz.relative_bias(
            weight, q_len, k_len, bidirectional=bidirectional, max_distance=max_distance, q_offset=offset
        )
        assert torch.equal(got, want)
        assert got.is_contiguous()


@pytest.mark.req("R-SEL-19", "R-OP-13")
def test_attention_with_the_bias_is_t5s_attention():
    layer = t5_layer(32, 4, True, 128)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = layer(x)[0]
        q, k, v = (p(x).view(2, 40, 4, 4).transpose(1, 2) for p in (layer.q, layer.k, layer.v))
        bias = lz.relative_bias(layer.relative_attention_bias.weight, 40, 40)
        for backend in (None, "reference", "sdpa.attention.flash_cpu", "sdpa.attention.math"):
            out = lz.attention(q, k, v, bias, scale=1.0, backend=backend)  # T5 does not scale
            assert_close(layer.o(out.transpose(1, 2).reshape(2, 40, 16)), want, BOUND)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", ["t5", "clip"])
def test_a_decode_step_sees_the_rows_of_the_whole_sequence(bidirectional, buckets):
    weight = table(33 if buckets == "clip" else 32, 4)
    full = lz.relative_bias(weight, 90, 90, buckets=buckets, bidirectional=bidirectional)
    last = lz.relative_bias(weight, 1, 90, buckets=buckets, bidirectional=bidirectional)
    assert torch.equal(last, full[:, :, -1:])
    early = lz.relative_bias(weight, 1, 50, buckets=buckets, bidirectional=bidirectional, q_offset=49)
    assert torch.equal(early, full[:, :, 49:50, :50])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_clipped_distances_pair_by_pair(bidirectional):
    rows = 9 if bidirectional else 5
    weight = table(rows, 3)
    got = lz.relative_bias(weight, 7, 12, buckets="clip", bidirectional=bidirectional)
    for i in range(7):
        for j in range(12):
            ahead = j - (i + 5)
            row = max(-4, min(4 if bidirectional else 0, ahead)) + 4
            assert torch.equal(got[0, :, i, j], weight[row])


def test_shaws_relative_keys_go_through_a_float_mask():
    """Shaw, Uszkoreit, Vaswani: score = q·(k + a[j - i]) / sqrt(d), with vectors clipped at distance 4."""
    q, k, v = qkv(6, 10, heads=2)
    vectors = table(9, 8, seed=3)
    want = torch.zeros(2, 2, 6, 8, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            for i in range(6):
                keys = torch.stack([k[b, h, j] + vectors[max(-4, min(4, j - i - 4)) + 4] for j in range(10)])
                weights = (keys.double() @ q[b, h, i].double() / 8**0.5).softmax(-1)
                want[b, h, i] = weights @ v[b, h].double()
    relative = lz.relative_bias(vectors, 6, 10, buckets="clip")
    bias = torch.einsum("bhid,dij->bhij", q * 8**-0.5, relative[0])
    for backend in (None, "reference"):
        assert_close(lz.attention(q, k, v, bias, backend=backend), want, BOUND)


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize("backend", [None, "reference", "sdpa.attention.math"])
def test_the_gradient_reaches_the_table(backend):
    weight = table(32, 4).requires_grad_()
    q, k, v = (t.requires_grad_() for t in qkv(20, 50))
    out = lz.attention(q, k, v, lz.relative_bias(weight, 20, 50, bidirectional=False), backend=backend)
    mark = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(out, (weight, q, k, v), mark)
    wide = [t.detach().double().requires_grad_() for t in (weight, q, k, v)]
    layer = t5_layer(32, 4, False, 128)
    place = torch.arange(50)[None] - (torch.arange(20)[:, None] + 30)
    rows = layer._relative_position_bucket(place, bidirectional=False, num_buckets=32, max_distance=128)
    scores = wide[1] @ wide[2].transpose(-1, -2) / 8**0.5 + wide[0][rows].permute(2, 0, 1)
    want = torch.autograd.grad(scores.softmax(-1) @ wide[3], wide, mark.double())
    for name, a, b in zip(("table", "q", "k", "v"), got, want, strict=True):
        assert_close(a, b, tolerance("gradient", torch.float32), path=name)


def test_gradcheck():
    weight = table(6, 2, torch.float64).requires_grad_()
    for options in ({"buckets": "t5", "max_distance": 9}, {"buckets": "t5", "bidirectional": False}):
        assert torch.autograd.gradcheck(lambda t, o=options: lz.relative_bias(t, 4, 7, **o), (weight,))
    odd = table(5, 2, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: lz.relative_bias(t, 4, 7, buckets="clip"), (odd,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_bias_has_the_dtype_of_the_table(oracle, dtype):
    weight = table(32, 4, dtype)
    q, k, v = qkv(20, 50, dtype=dtype)
    bias = lz.relative_bias(weight, 20, 50)
    assert bias.dtype is dtype
    want, _ = oracle.attention(q, k, v, mask=bias)
    assert_close(lz.attention(q, k, v, bias), want, tolerance("attention", dtype))


def test_in_one_compiled_graph_with_its_gradient():
    weight = table(32, 4).requires_grad_()
    q, k, v = qkv(12, 12)

    def layer(q, weight):
        return lz.attention(q, k, v, lz.relative_bias(weight, q.shape[2], k.shape[2]))

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    got, want = compiled(q, weight), layer(q, weight)
    assert_close(got, want, BOUND)
    for a, b in zip(torch.autograd.grad(got.sum(), weight), torch.autograd.grad(want.sum(), weight), strict=True):
        assert_close(a, b, tolerance("gradient", torch.float32))


W = table(32, 4)
BAD = {
    "a list": (lambda: lz.relative_bias([[1.0]], 4, 4), "TYPE_INVALID"),
    "integers": (lambda: lz.relative_bias(W.int(), 4, 4), "DTYPE_UNSUPPORTED"),
    "one axis": (lambda: lz.relative_bias(W[:, 0], 4, 4), "SHAPE_INVALID"),
    "no rows": (lambda: lz.relative_bias(W[:0], 4, 4), "SHAPE_INVALID"),
    "an odd number of buckets": (lambda: lz.relative_bias(W[:31], 4, 4), "SHAPE_INVALID"),
    "too few buckets": (lambda: lz.relative_bias(W[:2], 4, 4), "SHAPE_INVALID"),
    "an even number of clipped rows": (lambda: lz.relative_bias(W, 4, 4, buckets="clip"), "SHAPE_INVALID"),
    "a short distance": (lambda: lz.relative_bias(W, 4, 4, max_distance=8), "VALUE_INVALID"),
    "unknown buckets": (lambda: lz.relative_bias(W, 4, 4, buckets="log"), "VALUE_INVALID"),
    "negative length": (lambda: lz.relative_bias(W, -1, 4), "VALUE_INVALID"),
    "length as text": (lambda: lz.relative_bias(W, 4, "4"), "VALUE_INVALID"),
    "offset as float": (lambda: lz.relative_bias(W, 4, 4, q_offset=0.5), "TYPE_INVALID"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_clear_error(name):
    call, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code and caught.value.hint
