"""`lz.paged_attention` on every kernel: pages of 1 to 128 tokens, both layouts, prefill and decode, ragged contexts."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.model.enums import Layout
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero.runtime.state import state

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KERNELS = {
    "cpu": ["reference", "sdpa.paged_attention.gather_cpu"],
    "cuda": ["reference", "sdpa.paged_attention.gather_flash"],
}
PLACES = [(device, kernel) for device in DEVICES for kernel in KERNELS[device]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DECODE = ((1, 4, 5, 33, 0, 129), (1, 1, 1, 1, 1, 1))
MIXED = ((9, 40, 6, 17, 1), (9, 3, 1, 0, 1))


def scene(
    contexts, queries, *, page=4, heads=4, kv_heads=2, dim=16, dtype=torch.float32, index=torch.int32, layout="NHD",
    device="cpu", seed=0,
):  # fmt: skip
    """K and V of each sequence, and the same tokens on shuffled pages of a cache that is otherwise full of NaN."""
    gen = torch.Generator().manual_seed(seed)
    width = max(1, *(-(-n // page) for n in contexts)) + 1
    order = torch.randperm(len(contexts) * width + 3, generator=gen)
    caches = [torch.full((len(order), page, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    table = torch.full((len(contexts), width), -1, dtype=index)  # -1: a slot nobody may read
    kept = ([], [])
    for row, length in enumerate(contexts):
        pages = order[row * width : row * width + -(-length // page)]
        table[row, : len(pages)] = pages.to(index)
        for cache, sequences in zip(caches, kept, strict=True):
            tokens = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
            sequences.append(tokens.to(device))
            for t in range(length):
                cache[pages[t // page], t % page] = tokens[t]
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    query = torch.randn(sum(queries), heads, dim, generator=gen).to(device, dtype)
    lens = torch.tensor(contexts, dtype=index, device=device)
    new = None if set(queries) == {1} else torch.tensor(queries, dtype=index, device=device)
    batch = lz.paged_batch(table.to(device), lens, query_lens=new)
    return query, *(cache.to(device) for cache in caches), batch, *(torch.cat(sequences) for sequences in kept)


def want_of(oracle, q, k, v, contexts, queries, **options):
    return oracle.packed(q, k, v, queries, contexts, causal="bottom_right", **options)


def takes(kernel, *args, **options):
    return bool(lz.explain("paged_attention", *args, backend=kernel, **options).chosen)


@pytest.mark.req("R-OP-07", "R-API-02", "R-KV-02", "R-TOL-01")
@pytest.mark.parametrize(("device", "kernel"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "prefill and decode"])
def test_every_kernel_layout_and_dtype_against_the_formula(oracle, device, kernel, dtype, layout, lengths):
    contexts, queries = lengths
    for index in (torch.int32, torch.int64):
        q, kc, vc, batch, k, v = scene(contexts, queries, dtype=dtype, index=index, layout=layout, device=device)
        if not takes(kernel, q, kc, vc, batch, layout=layout, return_lse=True):
            assert device == "cuda" and dtype is torch.float32
            continue
        out, lse = lz.paged_attention(q, kc, vc, batch, layout=layout, return_lse=True, backend=kernel)
        want, want_lse = want_of(oracle, q, k, v, contexts, queries)
        assert out.dtype is dtype and lse.dtype is torch.float32
        assert_close(out, want, tolerance("paged_attention", dtype), path=f"{kernel} {index}")
        assert_close(lse, want_lse, tolerance("paged_attention", dtype), path=f"{kernel} {index} lse")
        for how in ("cold", "hot"):  # the kernel it takes when none is asked for
            out = lz.paged_attention(q, kc, vc, batch, layout=layout)
            assert_close(out, want, tolerance("paged_attention", dtype), path=f"{how} {index}")


@pytest.mark.req("R-OP-07", "R-KV-04")
@pytest.mark.parametrize("page", [1, 2, 3, 7, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("kernel", KERNELS["cpu"])
def test_pages_of_any_size(oracle, kernel, page):
    for layout in ("NHD", "HND"):
        q, kc, vc, batch, k, v = scene(*MIXED, page=page, layout=layout)
        out = lz.paged_attention(q, kc, vc, batch, layout=layout, backend=kernel)
        assert_close(out, want_of(oracle, q, k, v, *MIXED)[0], tolerance("attention", "float32"))


@pytest.mark.req("R-OP-07", "R-POS-03")
@pytest.mark.parametrize("kernel", KERNELS["cpu"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scale", {"scale": 0.4}),
        ("window", {"window": 5}),
        ("window of one", {"window": (0, 0)}),
        ("slopes", {"alibi_slopes": 1}),
        ("slopes per sequence", {"alibi_slopes": 2, "window": 7}),
        ("softcap", {"softcap": 1.5}),
    ],
)
def test_options_mean_what_they_mean_in_attention(oracle, kernel, name, options):
    for contexts, queries in (DECODE, MIXED):
        q, kc, vc, batch, k, v = scene(contexts, queries)
        given = dict(options)
        if "alibi_slopes" in given:
            shape = (4,) if given["alibi_slopes"] == 1 else (len(contexts), 4)
            given["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(2))
        if not takes(kernel, q, kc, vc, batch, **given):
            assert (kernel, name) == ("sdpa.paged_attention.gather_cpu", "softcap")
            continue
        out, lse = lz.paged_attention(q, kc, vc, batch, return_lse=True, backend=kernel, **given)
        words = {"alibi_slopes": "slopes"}
        want = want_of(oracle, q, k, v, contexts, queries, **{words.get(n, n): x for n, x in given.items()})
        assert_close((out, lse), want, tolerance("attention", "float32"))


@pytest.mark.req("R-OP-04")
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1], ids=["mha", "gqa2", "gqa4", "mqa"])
@pytest.mark.parametrize("kernel", KERNELS["cpu"])
def test_heads_of_a_group_share_their_kv_head(oracle, kernel, kv_heads):
    for contexts, queries in (DECODE, MIXED):
        q, kc, vc, batch, k, v = scene(contexts, queries, heads=8, kv_heads=kv_heads)
        out = lz.paged_attention(q, kc, vc, batch, backend=kernel)
        assert_close(out, want_of(oracle, q, k, v, contexts, queries)[0], tolerance("attention", "float32"))


@pytest.mark.req("R-OP-07")
def test_a_prompt_in_chunks_and_its_decode_steps_equal_one_pass(oracle):
    """Chunked prefill, then token by token, over a growing cache: the rows of one causal pass over all tokens."""
    total, page, gen = 37, 8, torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(total, n, 16, generator=gen) for n in (4, 2, 2))
    caches = [torch.full((6, page, 2, 16), torch.nan) for _ in range(2)]
    table = torch.tensor([[4, 0, 3, 1, 5]], dtype=torch.int32)
    want, _ = oracle.packed(q, k, v, (total,), (total,), causal=True)
    outs, filled = [], 0
    for count in (16, 9, 7, 1, 1, 1, 1, 1):
        for t in range(filled, filled + count):
            for cache, tokens in zip(caches, (k, v), strict=True):
                cache[table[0, t // page], t % page] = tokens[t]
        batch = lz.paged_batch(
            table,
            torch.tensor([filled + count], dtype=torch.int32),
            query_lens=None if count == 1 else torch.tensor([count], dtype=torch.int32),
        )
        outs.append(lz.paged_attention(q[filled : filled + count], *caches, batch))
        filled += count
    assert_close(torch.cat(outs), want, tolerance("attention", "float32"))


@pytest.mark.req("R-PT-04")
@pytest.mark.parametrize(("device", "kernel"), PLACES)
def test_gradients_reach_query_and_cache(oracle, device, kernel):
    dtype = torch.float32 if device == "cpu" else torch.float16
    contexts, queries = MIXED
    q, kc, vc, batch, k, v = scene(contexts, queries, dtype=dtype, device=device)
    kc, vc = (torch.nan_to_num(c).requires_grad_() for c in (kc, vc))  # no gradient is finite through a NaN
    q.requires_grad_()
    out = lz.paged_attention(q, kc, vc, batch, backend=kernel)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    got = torch.autograd.grad(out, (q, kc, vc), weight)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(want_of(oracle, *wide, contexts, queries)[0], wide, weight.double())
    bound = tolerance("attention", dtype) if dtype is torch.float32 else Tolerance(1e-2, 1e-2)  # R-GRP-10
    assert_close(got[0].double(), want[0], bound)
    for cache, flat in zip(got[1:], want[1:], strict=True):
        start = 0
        for row, length in enumerate(contexts):
            pages = batch.block_tables[row, : -(-length // 4)].long()
            assert_close(cache[pages].flatten(0, 1)[:length].double(), flat[start : start + length], bound)
            slots = [(int(pages[t // 4]), t % 4) for t in range(length)]
            for page, slot in slots:
                cache[page, slot] = 0.0
            start += length
        assert torch.count_nonzero(cache) == 0, "a gradient for a slot that no sequence holds"


def test_a_gradient_through_the_lse_goes_to_a_kernel_that_has_one():
    q, kc, vc, batch, *_ = scene(*MIXED)
    q.requires_grad_()
    assert lz.which("paged_attention", q, kc, vc, batch) == "sdpa.paged_attention.gather_cpu"
    assert lz.which("paged_attention", q, kc, vc, batch, return_lse=True) == "reference.paged_attention.plain"
    slopes = torch.rand(4, requires_grad=True)
    assert lz.which("paged_attention", q, kc, vc, batch, alibi_slopes=slopes) == "reference.paged_attention.plain"


@pytest.mark.parametrize("kernel", KERNELS["cpu"])
def test_a_page_number_outside_the_cache_never_reads_another_page(kernel):
    for page in (-1, 10_000):
        q, kc, vc, batch, *_ = scene((5,), (1,))
        batch.block_tables[0, 0] = page
        with pytest.raises(LayerZeroError):
            lz.paged_attention(q, kc, vc, batch, backend=kernel)
    state.health.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_sequences_without_context_give_zeros_over_a_cache_of_another_dtype(dtype):
    batch = lz.paged_batch(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    cache = torch.randn(4, 5, 2, 16).to(dtype)
    out = lz.paged_attention(torch.randn(2, 4, 16), cache, cache, batch)
    assert out.shape == (2, 4, 16) and not out.count_nonzero()


@pytest.mark.req("R-OP-07", "R-FAIL-07")
def test_metadata_of_different_dtypes_is_refused_hot_or_cold():
    q, kc, vc, batch, *_ = scene(*MIXED)
    tables, lens, new = batch.block_tables, batch.context_lens, batch.query_lens
    mixed = {
        "context_lens int64": lz.paged_batch(tables, lens.long(), query_lens=new),
        "query_lens int64": lz.paged_batch(tables, lens, query_lens=new.long()),
        "block_tables int64": lz.paged_batch(tables.long(), lens, query_lens=new),
    }
    for _ in range(2):
        lz.paged_attention(q, kc, vc, batch)
        for word, wrong in mixed.items():
            with pytest.raises(InvalidInputError) as caught:
                lz.paged_attention(q, kc, vc, wrong)
            (why,) = caught.value.reasons
            assert why.code == "BLOCK_TABLE_DTYPE" and word in why.value and why.limit == "one of int32, int64"
            assert caught.value.hint


@pytest.mark.req("R-OP-07", "R-FAIL-07")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_tables_that_are_no_indices_are_refused(dtype):
    q, kc, vc, batch, *_ = scene(*DECODE)
    with pytest.raises(InvalidInputError) as caught:
        lz.paged_attention(q, kc, vc, batch.block_tables.to(dtype), batch.context_lens)
    assert caught.value.code == "BLOCK_TABLE_DTYPE"


@pytest.mark.req("R-FAIL-07")
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda k, v: (k, v.half(), "NHD"), "KV_CACHE_DTYPE_MISMATCH"),
        (lambda k, v: (k, v, "BSHD"), "LAYOUT_UNKNOWN"),
        (lambda k, v: (k, v.transpose(1, 2), "NHD"), "SHAPE_INVALID"),
        (lambda k, v: (k.transpose(1, 2), v.transpose(1, 2), "NHD"), "BLOCK_TABLE_INVALID"),
    ],
    ids=["halves_of_two_dtypes", "no_layout_of_a_cache", "halves_of_two_layouts", "another_layout_than_was_said"],
)
def test_a_cache_that_is_not_what_was_said_of_it_is_refused_hot_or_cold_and_nothing_runs(lab, wrong, code):
    q, kc, vc, batch, *_ = scene(*MIXED, page=8)
    for _ in range(2):
        lz.paged_attention(q, kc, vc, batch)
        lab.clear()
        *caches, layout = wrong(kc, vc)
        with pytest.raises(InvalidInputError) as caught:
            lz.paged_attention(q, *caches, batch, layout=layout)
        assert caught.value.code == code and caught.value.hint and not lab.tries
    assert not state.health.snapshot().kernels


@pytest.mark.req("R-FAIL-07")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_kernel_for_another_layout_of_the_cache_is_passed_over_with_the_reason(lab, oracle, layout):
    plain = lab.builtin.kernels["reference.paged_attention.plain"]
    fields = {"features": plain.features, "index_dtypes": plain.index_dtypes, "priority": 90.0}
    lab.use(
        *(
            lab.kernel(f"a.paged_attention.{word.lower()}", kv_cache_layouts=frozenset({Layout(word)}), **fields)
            for word in ("NHD", "HND")
        )
    )
    q, kc, vc, batch, k, v = scene(*MIXED, layout=layout)
    out, ran = lab.run(lz.paged_attention, q, kc, vc, batch, layout=layout)
    other = "hnd" if layout == "NHD" else "nhd"
    (why,) = lz.validate(f"a.paged_attention.{other}", q, kc, vc, batch, layout=layout)
    assert (why.code, why.value, why.limit) == ("KV_CACHE_LAYOUT_MISMATCH", layout, other.upper())
    assert ran == [f"a.paged_attention.{layout.lower()}"]
    assert_close(out, want_of(oracle, q, k, v, *MIXED)[0], tolerance("attention", "float32"))


def test_a_growing_decode_loop_stays_hot_and_right(oracle):
    page, table = 8, torch.arange(32, dtype=torch.int32).reshape(2, 16)
    gen = torch.Generator().manual_seed(6)
    kc, vc = (torch.randn(32, page, 2, 16, generator=gen) for _ in range(2))
    q = torch.randn(2, 4, 16, generator=gen)
    state.counters.reset()
    for length in range(3, 120):
        lens = torch.tensor([length, length // 2], dtype=torch.int32)
        out = lz.paged_attention(q, kc, vc, lz.paged_batch(table, lens))
        if length % 29 == 0:
            rows = [cache[table[r]].flatten(0, 1)[:n] for cache in (kc, vc) for r, n in enumerate(lens.tolist())]
            want, _ = oracle.packed(q, torch.cat(rows[:2]), torch.cat(rows[2:]), (1, 1), lens.tolist())
            assert_close(out, want, tolerance("attention", "float32"))
    assert state.counters.selections <= 10


def test_a_failing_kernel_hands_over(lab, oracle):
    q, kc, vc, batch, k, v = scene(*MIXED)
    _, ran = lab.run(lz.paged_attention, q, kc, vc, batch)
    assert ran == ["sdpa.paged_attention.gather_cpu"]
    lab.faults["sdpa.paged_attention.gather_cpu"] = RuntimeError("out of order")
    out, ran = lab.run(lz.paged_attention, q, kc, vc, batch)
    assert ran == ["reference.paged_attention.plain"]
    assert_close(out, want_of(oracle, q, k, v, *MIXED)[0], tolerance("attention", "float32"))
