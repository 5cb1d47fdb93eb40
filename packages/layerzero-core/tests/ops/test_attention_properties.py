"""Attention, packed and paged attention over random shapes, dtypes, strides, options and edge values."""

from __future__ import annotations

import math
import os
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
EXAMPLES = 3_000 if PROVE else 25
many = settings(max_examples=EXAMPLES, deadline=None)
pytestmark = pytest.mark.timeout(1800 if PROVE else 300)

DTYPES = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]
EDGES = (math.nan, math.inf, -math.inf)
# Whole tensors of one magnitude: with head_dim 1 or 16 every score is exact, so that keys which tie stay tied.
MAGNITUDES = (0.0, 1e4, 2.0**-10, 1.0, 1e-40, 6e-8)

seeds = st.integers(0, 2**20)


@pytest.fixture(autouse=True)
def as_they_come():
    """The kernel that is chosen answers the first call too, proven or not: two calls are compared here."""
    lz.configure(on_first_use="off")
    yield
    lz.reset()


def tensor(draw, *shape, dtype):
    """Random numbers; contiguous, transposed, a slice of something wider, or every second element."""
    gen = torch.Generator().manual_seed(draw(seeds))
    kind = draw(st.sampled_from(("plain", "plain", "swapped", "slice", "step")))

    def numbers(*sizes):
        return torch.randn(sizes, generator=gen, dtype=torch.float64).to(dtype)

    if kind == "swapped":
        order = list(range(len(shape)))
        order[-3], order[-2] = order[-2], order[-3]
        return numbers(*(shape[i] for i in order)).transpose(-3, -2)
    if kind == "slice":
        return numbers(*shape[:-1], shape[-1] + 5)[..., 2 : 2 + shape[-1]]
    if kind == "step":
        return numbers(*shape[:-1], shape[-1] * 2)[..., ::2]
    return numbers(*shape)


@st.composite
def options(draw, heads, rows=1, *, causal=True, softcap=True):
    """Options of a call, and what the oracle calls them."""
    found = {}
    if causal:
        found["is_causal"] = draw(st.sampled_from((False, True, "bottom_right")))
    if draw(st.booleans()):
        found["window"] = draw(st.sampled_from((0, 2, 5, (3, -1), (-1, 1), (2, 4), (-1, -1))))
    if draw(st.booleans()):
        found["scale"] = draw(st.sampled_from((0.0, 0.3, -0.5, 2)))
    if softcap and draw(st.integers(0, 3)) == 0:
        found["softcap"] = draw(st.sampled_from((0.5, 20.0)))
    if draw(st.integers(0, 3)) == 0:
        shape = (heads,) if draw(st.booleans()) else (rows, heads)
        found["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(draw(seeds)))
    return found


def words(given):
    names = {"is_causal": "causal", "alibi_slopes": "slopes"}
    return {names.get(name, name): value for name, value in given.items()}


def twice(call, tensors):
    """The result, after seeing that a second run gives the same bits and that the inputs stay as they were."""
    before = [t.clone() for t in tensors]
    first, second = call(), call()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)), "an input was changed"
    return first


@st.composite
def sizes(draw):
    kv_heads = draw(st.integers(1, 3))
    return kv_heads * draw(st.integers(1, 4)), kv_heads, draw(st.sampled_from((1, 4, 8, 17, 32)))


# -- dense -----------------------------------------------------------------------------------------------
@st.composite
def dense_calls(draw):
    heads, kv_heads, dim = draw(sizes())
    batch, rows, cols = draw(st.integers(1, 2)), draw(st.integers(1, 20)), draw(st.integers(1, 24))
    dtype = draw(st.sampled_from(DTYPES))
    q = tensor(draw, batch, heads, rows, dim, dtype=dtype)
    k, v = (tensor(draw, batch, kv_heads, cols, dim, dtype=dtype) for _ in range(2))
    given = draw(options(heads, batch))
    kind = draw(st.sampled_from(("none", "none", "bool", "float", "chunk", "block")))
    table = None
    if kind != "none":
        given.pop("is_causal")
        gen = torch.Generator().manual_seed(draw(seeds))
        if kind == "chunk":
            given.pop("window", None)
            given["attn_mask"] = lz.chunk_mask(draw(st.integers(1, 30)))
            table = given["attn_mask"].dense(rows, cols)
        elif kind == "block":
            size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
            grid = torch.rand(-(-rows // size[0]), -(-cols // size[1]), generator=gen) > 0.4
            given["attn_mask"] = lz.block_mask(grid, size)
            table = given["attn_mask"].dense(rows, cols)
        else:
            table = torch.rand(draw(st.sampled_from((1, batch))), 1, rows, cols, generator=gen)
            given["attn_mask"] = table = table > 0.4 if kind == "bool" else table.to(dtype)
    layout = draw(st.sampled_from(("BHSD", "BSHD")))
    return (q, k, v), given, table, layout


@pytest.mark.req("R-PROP-01", "R-OP-02", "R-OP-04", "R-OP-05", "R-OP-09", "R-API-01")
@many
@given(call=dense_calls(), backend=st.sampled_from((None, None, "reference", "sdpa")))
def test_any_call_of_attention_is_the_formula(oracle, call, backend):
    qkv, given, table, layout = call
    args = qkv if layout == "BHSD" else tuple(t.transpose(1, 2) for t in qkv)
    report = lz.explain("attention", *args, layout=layout, backend=backend, return_lse=True, **given)
    lse = bool(report.chosen)  # some kernels have none; the call without it is tried then
    if not lse and not lz.explain("attention", *args, layout=layout, backend=backend, **given).chosen:
        return

    def run():
        found = lz.attention(*args, layout=layout, backend=backend, return_lse=lse, **given)
        return found if lse else (found,)

    found = twice(run, qkv)
    plain = {name: value for name, value in given.items() if name != "attn_mask"}
    want, want_lse = oracle.attention(*qkv, mask=table, **words(plain))
    tol = tolerance("attention", qkv[0].dtype)
    assert_close(found[0] if layout == "BHSD" else found[0].transpose(1, 2), want, tol, check_dtype=False)
    assert found[0].dtype is qkv[0].dtype
    if lse:
        # It comes in float32 whatever the inputs are.
        assert_close(found[1], want_lse, max(tol, tolerance("attention", "float32"), key=lambda t: t.atol))


@pytest.mark.req("R-PROP-01", "R-OP-03")
@many
@given(
    data=st.data(),
    magnitudes=st.tuples(*(st.sampled_from(MAGNITUDES) for _ in range(3))),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from((1, 16)),
    backend=st.sampled_from((None, "reference", "sdpa.attention.math")),
    causal=st.booleans(),
)
def test_edge_values_stay_where_they_belong(oracle, data, magnitudes, dtype, dim, backend, causal):
    """Zeros, denormals and ±1e4 give the formula's numbers; NaN and Inf touch their own row, or their own KV head."""
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    gen = torch.Generator().manual_seed(data.draw(seeds))
    q, k, v = (
        (torch.randn(1, heads, count, dim, generator=gen).sign() * size).to(dtype)
        for (heads, count), size in zip(((4, rows), (2, cols), (2, cols)), magnitudes, strict=True)
    )
    clean = [t.clone() for t in (q, k, v)]
    dirty_rows, dirty_heads = set(), set()
    for _ in range(data.draw(st.integers(0, 2))):
        which = data.draw(st.integers(0, 2))
        head, row = (
            data.draw(st.integers(0, (3, 1, 1)[which])),
            data.draw(st.integers(0, (rows, cols, cols)[which] - 1)),
        )
        (q, k, v)[which][0, head, row, data.draw(st.integers(0, dim - 1))] = data.draw(st.sampled_from(EDGES))
        if which == 0:
            dirty_rows.add((head, row))
        else:
            dirty_heads.update((2 * head, 2 * head + 1))
    (out,) = twice(lambda: (lz.attention(q, k, v, is_causal=causal, backend=backend),), (q, k, v))
    want, _ = oracle.attention(*clean, causal=causal)
    tol = tolerance("attention", dtype)
    # Attention is linear in the values, so the bound for values of size one is held by the result over their size.
    out, want = (t.double() / max(1.0, magnitudes[2]) for t in (out, want))
    for head in range(4):
        for row in range(rows):
            if head not in dirty_heads and (head, row) not in dirty_rows:
                assert_close(out[0, head, row], want[0, head, row], tol)


# -- packed ----------------------------------------------------------------------------------------------
@st.composite
def packed_calls(draw):
    heads, kv_heads, dim = draw(sizes())
    count = draw(st.integers(1, 4))
    lens_q = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    same = draw(st.booleans())
    lens_k = lens_q if same else draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    dtype = draw(st.sampled_from(DTYPES))
    q = tensor(draw, sum(lens_q), heads, dim, dtype=dtype)
    k, v = (tensor(draw, sum(lens_k), kv_heads, dim, dtype=dtype) for _ in range(2))
    index = draw(st.sampled_from((torch.int32, torch.int64)))
    cu_q, cu_k = (torch.tensor([0, *accumulate(lens)], dtype=index) for lens in (lens_q, lens_k))
    return (q, k, v), (lens_q, lens_k), (cu_q, cu_q if same else cu_k), draw(options(heads, count))


@pytest.mark.req("R-PROP-01", "R-OP-12")
@many
@given(call=packed_calls(), backend=st.sampled_from((None, None, "reference")))
def test_any_packed_call_is_each_sequence_alone(oracle, call, backend):
    qkv, lens, cu, given = call

    def run():
        return lz.varlen_attention(*qkv, *cu, return_lse=True, backend=backend, **given)

    out, lse = twice(run, qkv)
    want, want_lse = oracle.packed(*qkv, *lens, **words(given))
    tol = tolerance("varlen_attention", qkv[0].dtype)
    assert out.dtype is qkv[0].dtype
    assert_close(out, want, tol)
    assert_close(lse, want_lse, max(tol, tolerance("attention", "float32"), key=lambda t: t.atol))


@pytest.mark.req("R-PROP-01", "R-OP-12")
@many
@given(call=packed_calls(), split=st.integers(0, 4))
def test_a_batch_is_its_parts_one_after_the_other(call, split):
    (q, k, v), (lens_q, lens_k), (cu_q, cu_k), given = call
    given.pop("alibi_slopes", None)
    whole = lz.varlen_attention(q, k, v, cu_q, cu_k, **given)
    parts = []
    for rows in (slice(0, split), slice(split, None)):
        own_q, own_k = lens_q[rows], lens_k[rows]
        start_q, start_k = sum(lens_q[: rows.start]), sum(lens_k[: rows.start])
        cu = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (own_q, own_k)]
        keys = slice(start_k, start_k + sum(own_k))
        parts.append(lz.varlen_attention(q[start_q : start_q + sum(own_q)], k[keys], v[keys], *cu, **given))
    assert_close(torch.cat(parts), whole, tolerance("varlen_attention", q.dtype))


# -- paged -----------------------------------------------------------------------------------------------
@st.composite
def paged_calls(draw):
    heads, kv_heads, dim = draw(sizes())
    count, page = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 8, 16)))
    contexts = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    queries = [draw(st.integers(0, max(n, 1))) if n else draw(st.integers(0, 1)) for n in contexts]
    dtype = draw(st.sampled_from(DTYPES))
    q = tensor(draw, sum(queries), heads, dim, dtype=dtype)
    k, v = (tensor(draw, sum(contexts), kv_heads, dim, dtype=dtype).contiguous() for _ in range(2))
    index = draw(st.sampled_from((torch.int32, torch.int64)))
    given = draw(options(heads, count, causal=False))
    return (q, k, v), contexts, queries, page, index, draw(st.sampled_from(("NHD", "HND"))), given


def on_pages(tokens, contexts, page, order, layout):
    """The tokens of all sequences on the pages that `order` names; all other slots hold NaN."""
    cache = torch.full((len(order) + 1, page, *tokens.shape[1:]), math.nan, dtype=tokens.dtype)
    width = max(1, *(-(-n // page) for n in contexts))
    table = torch.full((len(contexts), width), -1)
    start = used = 0
    for row, length in enumerate(contexts):
        pages = order[used : used + -(-length // page)]
        used += len(pages)
        table[row, : len(pages)] = pages
        for t in range(length):
            cache[pages[t // page], t % page] = tokens[start + t]
        start += length
    return (cache if layout == "NHD" else cache.transpose(1, 2).contiguous()), table


@pytest.mark.req("R-PROP-01", "R-OP-07")
@many
@given(call=paged_calls(), shuffles=st.tuples(seeds, seeds), backend=st.sampled_from((None, None, "reference")))
def test_any_paged_call_is_the_formula_wherever_its_pages_lie(oracle, call, shuffles, backend):
    (q, k, v), contexts, queries, page, index, layout, given = call
    blocks = sum(-(-n // page) for n in contexts)
    found = []
    for seed in shuffles:
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
        (kc, table), (vc, _) = (on_pages(t, contexts, page, order, layout) for t in (k, v))
        batch = lz.paged_batch(
            table.to(index), torch.tensor(contexts, dtype=index), query_lens=torch.tensor(queries, dtype=index)
        )
        rest = {"layout": layout, "return_lse": True, "backend": backend, **given}
        found.append(twice(lambda a=(q, kc, vc, batch), r=rest: lz.paged_attention(*a, **r), (q, kc, vc)))
    (out, lse), (moved, moved_lse) = found
    assert torch.equal(out, moved) and torch.equal(lse, moved_lse), "where a page lies changes the result"
    want, want_lse = oracle.packed(q, k, v, queries, contexts, causal="bottom_right", **words(given))
    tol = tolerance("paged_attention", q.dtype)
    assert_close(out, want, tol)
    assert_close(lse, want_lse, max(tol, tolerance("attention", "float32"), key=lambda t: t.atol))
