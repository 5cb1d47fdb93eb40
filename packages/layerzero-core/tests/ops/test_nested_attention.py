"""Nested tensors given to `lz.attention`: jagged ones are computed, all others refused with what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

pytestmark = [
    pytest.mark.req("R-OP-12"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

LENGTHS = (5, 1, 8, 3)
BOUND = tolerance("attention", torch.float32)


def jagged(lengths=LENGTHS, heads=4, dim=8, seed=0, grad=False):
    """A jagged tensor [B, S, H, D], and its sequences one by one."""
    gen = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, heads, dim, generator=gen) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad), parts


def alone(q, k, v, **options):
    """Each sequence through torch's own attention, in float64."""
    outs = []
    for parts in zip(q, k, v, strict=True):
        heads_first = [t.double().transpose(0, 1)[None] for t in parts]
        outs.append(F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **options)[0].transpose(0, 1))
    return outs


def sequences(nested):
    return [item.detach() for item in nested.unbind()]


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_jagged_batch_gives_a_jagged_result(layout, causal, kv_heads):
    (q, qs), (k, ks), (v, vs) = jagged(), jagged(heads=kv_heads, seed=1), jagged(heads=kv_heads, seed=2)
    given = (q, k, v) if layout == "BSHD" else tuple(t.transpose(1, 2) for t in (q, k, v))
    out = lz.attention(*given, is_causal=causal, layout=layout)
    assert out.is_nested and out.layout is torch.jagged
    assert out.shape == given[0].shape, "the ragged axis is the query's own"
    assert (out + given[0]).shape == out.shape, "torch must see the same ragged axis, or a residual cannot be added"
    rows = sequences(out if layout == "BSHD" else out.transpose(1, 2))
    for got, want in zip(rows, alone(qs, ks, vs, is_causal=causal), strict=True):
        assert_close(got, want, BOUND)


def test_it_equals_torchs_own_nested_attention():
    q, k, v = (jagged(seed=i)[0].transpose(1, 2) for i in range(3))
    want = F.scaled_dot_product_attention(q, k, v)
    for got, expected in zip(lz.attention(q, k, v).unbind(), want.unbind(), strict=True):
        assert_close(got, expected, BOUND)


def test_keys_may_be_ragged_in_another_way():
    (q, qs), (k, ks), (_, _) = jagged(), jagged((2, 9, 4, 7), seed=1), jagged()
    v = torch.nested.nested_tensor_from_jagged(k.values() * 2, offsets=k.offsets())
    out = lz.attention(q, k, v, layout="BSHD", window=(3, -1))
    for got, a, b in zip(sequences(out), qs, ks, strict=True):
        rows, cols = len(a), len(b)
        at = torch.arange(rows)[:, None] + cols - rows
        mask = torch.arange(cols)[None] >= at - 3
        (want,) = alone([a], [b], [b * 2], attn_mask=mask)
        assert_close(got, torch.where(mask.any(-1)[:, None, None], want, 0.0), BOUND)


def test_three_axes_are_one_head():
    gen = torch.Generator().manual_seed(3)
    parts = [torch.randn(n, 8, generator=gen) for n in LENGTHS]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out, lse = lz.attention(x, x, x, return_lse=True)
    assert out.shape == x.shape and lse.shape == x.shape[:2]
    for got, part in zip(sequences(out), parts, strict=True):
        want = F.scaled_dot_product_attention(*(part.double()[None] for _ in range(3)))[0]
        assert_close(got, want, BOUND)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_the_lse_is_jagged_as_well(layout):
    q, parts = jagged()
    given = q if layout == "BSHD" else q.transpose(1, 2)
    _, lse = lz.attention(given, given, given, layout=layout, return_lse=True)
    assert lse.shape[:2] == (len(LENGTHS), 4)  # [B, H, S] whatever the layout
    for got, part in zip(sequences(lse.transpose(1, 2)), parts, strict=True):
        scores = torch.einsum("qhd,khd->hqk", part.double(), part.double()) / 8**0.5
        assert_close(got, scores.logsumexp(-1).transpose(0, 1), BOUND)


def test_gradients_reach_the_nested_inputs():
    tensors = [jagged(seed=i, grad=True) for i in range(3)]
    q, k, v = (t for t, _ in tensors)
    lz.attention(q, k, v, layout="BSHD", is_causal=True).values().square().sum().backward()
    flat = [[p.clone().requires_grad_() for p in parts] for _, parts in tensors]
    torch.cat(alone(*flat, is_causal=True)).square().sum().backward()
    for nested, parts in zip((q, k, v), flat, strict=True):
        assert_close(nested.grad.values(), torch.cat([p.grad for p in parts]), BOUND)


def test_slopes_and_softcap_pass_through(oracle):
    (q, qs), slopes = jagged(), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    out = lz.attention(q, q, q, layout="BSHD", is_causal="bottom_right", alibi_slopes=slopes, softcap=4.0, scale=0.3)
    flat = torch.cat(qs)
    want, _ = oracle.packed(
        flat, flat, flat, LENGTHS, LENGTHS, slopes=slopes, causal="bottom_right", softcap=4.0, scale=0.3
    )
    assert_close(out.values(), want, BOUND)


@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_one_compiled_graph(grad):
    q, _ = jagged(grad=grad)

    def layer(x):
        return lz.attention(x, x, x, layout="BSHD", is_causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if grad else "eager")
    assert_close(compiled(q).values(), layer(q).values(), BOUND)


def strided():
    return torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 4, 8)])


def with_holes():
    return torch.nested.narrow(torch.randn(2, 6, 4, 8), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), torch.jagged)


J = jagged()[0]
BAD = {
    "strided layout": (lambda: (strided(),) * 3, {}, "RAGGED_UNSUPPORTED", "torch.strided"),
    "a dense key": (lambda: (J, torch.randn(4, 8, 4, 8), J), {}, "RAGGED_UNSUPPORTED", "key is a plain tensor"),
    "a dense query": (lambda: (torch.randn(4, 8, 4, 8), J, J), {}, "RAGGED_UNSUPPORTED", "query is a plain tensor"),
    "holes": (lambda: (with_holes(),) * 3, {}, "RAGGED_UNSUPPORTED", "contiguous"),
    "the other layout": (lambda: (J, J, J), {"layout": "BHSD"}, "RAGGED_UNSUPPORTED", "axis 1"),
    "a mask": (lambda: (J, J, J), {"attn_mask": torch.ones(8, 8)}, "RAGGED_UNSUPPORTED", "attn_mask"),
    "a chunk mask": (lambda: (J, J, J), {"attn_mask": lz.chunk_mask(4)}, "RAGGED_UNSUPPORTED", "attn_mask"),
    "dropout": (lambda: (J, J, J), {"dropout_p": 0.5}, "RAGGED_UNSUPPORTED", "dropout_p=0.5"),
    "values of other lengths": (lambda: (J, J, jagged((8, 3, 5, 1))[0]), {}, "SHAPE_INVALID", "value"),
    "another batch": (lambda: (J, *(jagged((5, 1))[0],) * 2), {}, "SHAPE_INVALID", "cu_seqlens"),
    "unknown layout": (lambda: (J, J, J), {"layout": "SBHD"}, "LAYOUT_UNKNOWN", "SBHD"),
    "two axes": (
        lambda: (torch.nested.nested_tensor([torch.randn(3), torch.randn(4)], layout=torch.jagged),) * 3,
        {}, "RANK_INVALID", "rank 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_everything_else_is_refused_in_one_clear_error(name):
    make, options, code, word = BAD[name]
    for _ in range(2):
        with pytest.raises(InvalidInputError) as caught:
            lz.attention(*make(), **{"layout": "BSHD", **options})
        assert caught.value.code == code
        assert word in str(caught.value)
        if code == "RAGGED_UNSUPPORTED":
            assert "lz.varlen_attention" in caught.value.hint and "pad" in caught.value.hint


def test_explain_says_what_to_ask_instead():
    with pytest.raises(InvalidInputError) as caught:
        lz.explain("attention", J, J, J, layout="BSHD")
    assert caught.value.code == "RAGGED_UNSUPPORTED" and "varlen_attention" in caught.value.hint
