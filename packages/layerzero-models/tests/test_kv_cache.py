"""`lz.kv_cache`: strategies, layouts, formats, what is refused and why, and which kernels may read it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError, NoKernelFoundError
from layerzero.model.enums import Layout
from layerzero.numerics import assert_close, tolerance
from layerzero.runtime.state import state

STRATEGIES = ("paged", "contiguous", "chunked")
LAYOUTS = ("NHD", "HND")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FIXED = {"quant": "fp8_e4m3", "k_scale": 0.02, "v_scale": 0.01}


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(strategy="paged", **options):
    sizes = {"batch": 2, "num_kv_heads": 2, "head_dim": 16, "max_len": 32, "page_size": 4, "chunk_size": 8}
    return lz.kv_cache(strategy, **{**sizes, **options})


def filled(strategy="paged", lens=(9, 5), seed=1, **options):
    cache = make(strategy, **options)
    for layer in range(cache.layers):
        key = noise(sum(lens), 2, 16, dtype=cache.dtype, seed=seed + layer).to(cache.device)
        value = noise(sum(lens), 2, cache.value_codec.width, dtype=cache.dtype, seed=seed + 50 + layer).to(cache.device)
        cache.append(key, value, lens=lens, layer=layer)
    return cache


def attention(keys, values, query, *, scale=None, window=None, softcap=None, slopes=None):
    """Float64, written out: keys [L, H, D], query [n, Hq, D] whose tokens are the last n. Output and log-sum-exp."""
    group = query.shape[1] // keys.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * (scale or 1 / math.sqrt(query.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    offset = torch.arange(len(k)) - (torch.arange(len(query))[:, None] + len(k) - len(query))
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * offset.abs()
    seen = offset <= 0
    if window is not None:
        seen &= offset >= -window
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def truth(cache, query, lens, layer=0, **options):
    parts, start = [], 0
    for seq, count in enumerate(lens):
        keys, values = (t.cpu() for t in cache.tokens(seq, layer))
        parts.append(attention(keys, values, query[start : start + count].cpu(), **options))
        start += count
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


# -- attention over every kind of cache --------------------------------------------------------------
@pytest.mark.req("R-KV-01", "R-KV-02")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant", [{}, {"quant": "fp8_e4m3"}, FIXED], ids=["plain", "fp8", "fp8_fixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefill_and_decode_attend_what_the_cache_holds(strategy, layout, quant, dtype, device):
    bound = tolerance("attention", dtype)
    cache = make(strategy, layout=layout, dtype=dtype, device=device, **quant)
    for step, lens in enumerate(([6, 6], [1, 1], [3, 9], [1, 1], [2, 0], [1, 1])):  # even, then ragged
        count = sum(lens)
        cache.append(
            noise(count, 2, 16, dtype=dtype, seed=step).to(device),
            noise(count, 2, 16, dtype=dtype, seed=step + 9).to(device),
            lens=lens,
        )
        query = noise(count, 4, 16, dtype=dtype, seed=step + 20).to(device)
        got, lse = cache.attend(query, lens=lens, return_lse=True)
        want, want_lse = truth(cache, query, lens)
        assert got.dtype == dtype and lse.dtype == torch.float32
        assert_close(got.double().cpu(), want, bound)
        assert_close(lse.double().cpu(), want_lse, bound)
        # Without the log-sum-exp another kernel may be the best one.
        assert_close(cache.attend(query, lens=lens).double().cpu(), want, bound)
        for call in cache.calls(query, lens=lens):
            assert lz.which(call.op, *call.args, **call.kwargs)  # explainable, by normal selection


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"window": 3}, {"softcap": 2.0}, {"alibi_slopes": torch.tensor([0.5, 0.1, 0.9, 0.3])}],
    ids=lambda o: next(iter(o)),
)
@pytest.mark.parametrize("lens", [(1, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_of_attention_hold_over_the_cache(strategy, lens, options):
    for cache in (filled(strategy, (13, 13)), filled(strategy, (19, 10)), filled(strategy, (13, 13), **FIXED)):
        query = noise(sum(lens), 4, 16, seed=3)
        words = {("slopes" if name == "alibi_slopes" else name): value for name, value in options.items()}
        want, _ = truth(cache, query, lens, **words)
        assert_close(cache.attend(query, lens=lens, **options).double(), want, tolerance("attention", torch.float32))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_padded_query_comes_back_padded(strategy):
    cache, query = filled(strategy, (9, 7)), noise(2, 4, 3, 16)
    for lens in (None, (3, 1)):
        out, lse = cache.attend(query, lens=lens, return_lse=True)
        assert out.shape == (2, 4, 3, 16) and lse.shape == (2, 4, 3)
        used = lens or (3, 3)
        packed = torch.cat([query[s, :, :n].transpose(0, 1) for s, n in enumerate(used)])
        want, _ = truth(cache, packed, used)
        assert_close(
            torch.cat([out[s, :, :n].transpose(0, 1) for s, n in enumerate(used)]).double(),
            want,
            tolerance("attention", torch.float32),
        )


def test_values_may_be_of_another_width():
    for strategy in STRATEGIES:
        cache = filled(strategy, head_dim_v=8)
        query = noise(2, 4, 16)
        want, _ = truth(cache, query, (1, 1))
        assert_close(cache.attend(query).double(), want, tolerance("attention", torch.float32))


def test_a_token_that_sees_several_chunks_weighs_them_rightly():
    """Chunks whose scores differ by far: a plain average of them would be far off."""
    cache = make("chunked", batch=1, chunk_size=2)
    key = torch.zeros(1, 2, 6, 16)
    key[:, :, 2:4] = 5.0
    value = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 16).contiguous()
    cache.append(key, value)
    query = torch.ones(1, 4, 16)
    assert len(cache.calls(query)) == 3
    out, lse = cache.attend(query, return_lse=True)
    want, want_lse = truth(cache, query, (1,))
    assert want[0, 0, 0] == pytest.approx(2.5, abs=1e-6)
    assert_close(out.double(), want, tolerance("attention", torch.float32))
    assert_close(lse.double(), want_lse, tolerance("attention", torch.float32))


@pytest.mark.req("R-TOL-07")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("quant", ["int8", "fp8_e4m3", "fp8_e5m2", "int4", "mxfp4", "nf4"])
def test_attention_over_a_quantized_cache_is_exactly_that_over_its_numbers(strategy, quant):
    """Quantizing costs what it costs when a token goes in; reading adds nothing, and 1e-2 holds for INT8."""
    cache = make(strategy, quant=quant, head_dim=32)
    key, value = noise(17, 2, 32, seed=4), noise(17, 2, 32, seed=5)
    cache.append(key, value, lens=(11, 6))
    plain = make(strategy, head_dim=32)
    for seq in range(2):
        read = cache.tokens(seq)
        only = [len(read[0]) if other == seq else 0 for other in range(2)]
        plain.append(*read, lens=only)
    query = noise(2, 4, 32, seed=6)
    plain.attend(query)  # where its kernel has no proof, the first answer is checked and may be another's
    got = cache.attend(query)
    assert torch.equal(got, plain.attend(query))
    if quant == "int8":
        full = make(strategy, head_dim=32)
        full.append(key, value, lens=(11, 6))
        bound = tolerance("attention", "int8")
        assert (bound.rtol, bound.atol) == (1e-2, 1e-2)
        assert_close(got, full.attend(query), bound)


# -- growing, cutting, sharing -----------------------------------------------------------------------
@pytest.mark.req("R-KV-04")
def test_pages_are_taken_given_back_and_shared():
    cache = make(num_pages=8, layers=2)
    one = noise(1, 2, 16)
    for layer in range(2):
        cache.append(noise(9, 2, 16), noise(9, 2, 16), lens=(5, 4), layer=layer)
    assert cache.free_pages == 8 - 2 - 1  # layers share pages
    cache.free(1)
    assert cache.free_pages == 6 and cache.lengths() == (5, 0) == cache.lengths(1)
    cache.fork(0, 1)
    assert cache.free_pages == 6 and cache.lengths() == (5, 5)  # nothing copied yet
    before = [cache.tokens(0, layer)[0] for layer in range(2)]
    cache.append(one, one, lens=(0, 1))
    assert cache.free_pages == 5  # the half-filled page alone
    assert torch.equal(cache.tokens(0)[0], before[0]) and torch.equal(cache.tokens(1, 1)[0], before[1])
    assert torch.equal(cache.tokens(1)[0], torch.cat((before[0], one)))
    cache.append(one * 2, one * 2, lens=(1, 0))  # the last holder writes in place
    assert cache.free_pages == 5
    assert torch.equal(cache.tokens(1)[0], torch.cat((before[0], one)))
    assert torch.equal(cache.tokens(0)[0], torch.cat((before[0], one * 2)))


def test_writing_into_a_shared_full_page_after_a_cut_does_not_reach_the_other():
    for strategy in STRATEGIES:
        cache = make(strategy)
        key = noise(8, 2, 16)
        cache.append(key, key, lens=(8, 0))
        cache.fork(0, 1)
        cache.truncate((2, 8))
        cache.append(-torch.ones(3, 2, 16), torch.ones(3, 2, 16), lens=(3, 0))
        assert torch.equal(cache.tokens(1)[0], key), strategy
        assert torch.equal(cache.tokens(0)[0], torch.cat((key[:2], -torch.ones(3, 2, 16)))), strategy


@pytest.mark.req("R-KV-04", "R-KV-05")
def test_a_full_pool_refuses_and_changes_nothing():
    cache = make(num_pages=3)
    cache.append(noise(8, 2, 16), noise(8, 2, 16), lens=(6, 2))
    before = [cache.tokens(seq)[0] for seq in range(2)]
    with pytest.raises(InvalidInputError) as caught:
        cache.append(noise(6, 2, 16), noise(6, 2, 16), lens=(3, 3))
    assert caught.value.code == "KV_CACHE_FULL"
    assert (caught.value.reasons[0].value, caught.value.reasons[0].limit) == ("2 new pages", "0 of 3 pages")
    assert cache.lengths() == (6, 2) and all(torch.equal(cache.tokens(s)[0], t) for s, t in enumerate(before))
    cache.append(noise(4, 2, 16), noise(4, 2, 16), lens=(2, 2))  # both fit their last page


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sequence_grows_beyond_the_longest_that_was_said(strategy):
    cache = make(strategy, max_len=6)
    with pytest.raises(InvalidInputError) as caught:
        cache.append(noise(2, 2, 7, 16), noise(2, 2, 7, 16))
    assert caught.value.code == "KV_CACHE_FULL" and cache.lengths() == (0, 0)


def test_chunks_come_and_go_with_the_longest_sequence():
    cache = make("chunked", max_len=None)
    assert cache.nbytes == 0
    cache.append(noise(20, 2, 16), noise(20, 2, 16), lens=(18, 2))
    one = 2 * 8 * 2 * 16 * 4  # sequences, slots, heads, dims, bytes
    assert cache.nbytes == 3 * 2 * one
    cache.truncate((9, 9))
    assert cache.nbytes == 2 * 2 * one and cache.lengths() == (9, 2)
    cache.free(0)
    assert cache.nbytes == 2 * one


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rejected_drafts_are_rolled_back(strategy):
    """Speculation: four drafts go in, two are kept; what follows is as if the others had never been."""
    cache, plain = filled(strategy, (5, 5)), filled(strategy, (5, 5))
    drafts = noise(2, 2, 4, 16, seed=8)
    cache.append(drafts, drafts)
    cache.truncate([7, 7])
    plain.append(drafts[:, :, :2], drafts[:, :, :2])
    token, query = noise(2, 2, 1, 16, seed=9), noise(2, 4, 16, seed=10)
    for each in (cache, plain):
        each.append(token, token)
    cache.attend(query)  # where its kernel has no proof, the first answer is checked and may be another's
    assert torch.equal(cache.attend(query), plain.attend(query))


@pytest.mark.req("R-KV-01", "R-KV-02")
@pytest.mark.parametrize("quant", [None, "fp8_e4m3", "int4"])
def test_conversion_keeps_every_bit_and_another_format_rounds_once(quant):
    cache = filled("paged", (9, 5), quant=quant, layers=2)
    tokens = [cache.tokens(s, layer) for s in range(2) for layer in range(2)]
    for strategy in STRATEGIES:
        for layout in LAYOUTS:
            other = cache.to(strategy=strategy, layout=layout, page_size=3)
            assert (other.strategy, other.layout, other.lengths(1)) == (strategy, layout, (9, 5))
            for (key, value), (k, v) in zip(
                [other.tokens(s, layer) for s in range(2) for layer in range(2)], tokens, strict=True
            ):
                assert torch.equal(k, key) and torch.equal(v, value)
    narrow = cache.to(quant="int8")
    for seq in range(2):
        key = cache.tokens(seq)[0]
        want = lz.dequantize(lz.quantize(key, "int8", granularity="channel"))
        assert torch.equal(narrow.tokens(seq)[0], want)
    assert cache.to(dtype=torch.bfloat16).tokens(0)[0].dtype == torch.bfloat16


def test_quantized_caches_are_smaller():
    plain = make(dtype=torch.bfloat16).nbytes
    assert make(dtype=torch.bfloat16, **FIXED).nbytes * 2 == plain
    assert make(dtype=torch.bfloat16, quant="fp8_e4m3").nbytes * 2 == plain * (1 + 4 / 16)  # a float32 scale per head
    assert make(dtype=torch.bfloat16, quant="mxfp4", head_dim=32).nbytes * 3 < 2 * plain


# -- what kernels see --------------------------------------------------------------------------------
@pytest.mark.req("R-KV-04")
def test_the_batch_is_that_of_paged_attention_and_of_flashinfer():
    cache = filled(lens=(9, 5))
    batch = cache.paged_batch((2, 1))
    assert batch.context_lens_host == (9, 5) and batch.query_lens_host == (2, 1)
    assert cache.paged_batch((2, 1)) is batch  # planned once for all layers
    keys, values = cache.pages()
    query = noise(3, 4, 16)
    want, _ = truth(cache, query, (2, 1))
    assert_close(lz.paged_attention(query, keys, values, batch).double(), want, tolerance("attention", torch.float32))
    indptr, places, last = batch.page_places(4)
    indices = batch.block_tables.flatten()[places]
    assert indptr.tolist() == [0, 3, 5] and last.tolist() == [1, 1]
    assert {t.dtype for t in (indptr, last)} == {torch.int32}
    read = [torch.cat([keys[p] for p in indices[a:b]]) for a, b in pairwise(indptr.tolist())]
    for seq, pages in enumerate(read):
        filled_slots = (len(pages) // 4 - 1) * 4 + last[seq]
        assert torch.equal(pages[:filled_slots], cache.tokens(seq)[0])
    cache.free(0)
    assert cache.paged_batch((0, 1)).page_places(4)[2].tolist() == [0, 1]


@pytest.mark.req("R-KV-03", "R-KV-05", "R-CTX-11")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_are_filtered_by_the_layout_and_page_size_of_the_cache(lab, layout):
    both = {"gqa", "paged", "paged_prefill", "lse", "head_dim_v"}
    limit = lab.builtin.kernels["reference.paged_attention.plain"]
    fields = {"features": frozenset(both), "index_dtypes": limit.index_dtypes, "priority": 90.0}
    made = [
        lab.kernel(f"a.paged_attention.{word.lower()}", kv_cache_layouts=frozenset({Layout(word)}), **fields)
        for word in LAYOUTS
    ]
    lab.use(*made)
    cache, query = filled(layout=layout), noise(2, 4, 16)
    _, ran = lab.run(cache.attend, query)
    assert ran[-1] == f"a.paged_attention.{layout.lower()}"
    (call,) = cache.calls(query)
    other = "HND" if layout == "NHD" else "NHD"
    why = lz.validate(f"a.paged_attention.{other.lower()}", *call.args, **call.kwargs)
    assert [item.code.value for item in why] == ["KV_CACHE_LAYOUT_MISMATCH"]
    assert (why[0].value, why[0].limit) == (layout, other)
    ctx = lz.explain(call.op, *call.args, **call.kwargs).context
    assert (ctx.kv_cache_layout, ctx.kv_cache_dtype, ctx.dim("page_size")) == (Layout(layout), "float32", 4)
    _, ran = lab.run(filled(layout=layout).to(layout=other).attend, query)
    assert ran[-1] == f"a.paged_attention.{other.lower()}"


@pytest.mark.req("R-QUANT-08", "R-KV-05", "R-FAIL-07")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_a_cache_of_another_dtype_is_cast_when_allowed_and_refused_when_not(strategy, kept):
    cache, query = filled(strategy, (9, 5), dtype=kept), noise(2, 4, 16)
    got = cache.attend(query)
    assert got.dtype == torch.float32
    want, _ = truth(cache, query, (1, 1))
    assert_close(got.double(), want, tolerance("attention", torch.float32))
    word = str(kept).removeprefix("torch.")
    for call in cache.calls(query):
        steps = {step.name for step in lz.explain(call.op, *call.args, **call.kwargs).decision.winner.transforms}
        assert f"cast_kv:{word}->float32" in steps
    for words in ({"allow_adaptation": False}, {"strict_mode": True}):
        with lz.scoped(**words), pytest.raises(NoKernelFoundError) as caught:
            cache.attend(query)
        assert {"ADAPTATION_NOT_ALLOWED", "KV_CACHE_DTYPE_MISMATCH"} & {r.code.value for r in caught.value.reasons}


@pytest.mark.req("R-QUANT-08")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scales_of_tokens_are_applied_when_allowed_and_said_or_refused(strategy):
    cache, query = filled(strategy, (9, 5), quant="fp8_e4m3"), noise(2, 4, 16)
    notes = {note.code.value: note for call in cache.calls(query) for note in call.notes}
    assert notes["ADAPTED"].value == "dequantize:fp8_e4m3->float32"
    for words in ({"allow_adaptation": False}, {"strict_mode": True}):
        with lz.scoped(**words), pytest.raises(NoKernelFoundError) as caught:
            cache.attend(query)
        assert caught.value.code == "ADAPTATION_NOT_ALLOWED"
        assert "dequantize:fp8_e4m3" in str(caught.value)


@pytest.mark.req("R-QUANT-08")
def test_a_kernel_that_reads_fp8_pages_gets_them_as_they_are(lab):
    """One scale for the cache goes into the softmax scale and the result, so codes need no conversion."""
    seen = []

    def native(query, keys, values, *rest):
        seen.append((keys.dtype, values.dtype))
        return lab.reference("paged_attention")(query, keys.to(query.dtype), values.to(query.dtype), *rest)

    features = frozenset({"gqa", "paged", "paged_prefill", "kv_float8_e4m3fn", "head_dim_v"})
    layouts = frozenset({Layout.NHD})
    lab.use(lab.kernel("a.paged_attention.fp8", native, features=features, kv_cache_layouts=layouts, priority=90.0))
    cache, query = filled(**FIXED), noise(2, 4, 16)
    with lz.scoped(strict_mode=True):
        got, ran = lab.run(cache.attend, query)
    assert ran == ["a.paged_attention.fp8"] and seen == [(torch.float8_e4m3fn,) * 2]
    want, _ = truth(cache, query, (1, 1))
    assert_close(got.double(), want, tolerance("attention", torch.float32))


@pytest.mark.req("R-QUANT-08")
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16, torch.float16), (torch.bfloat16, torch.float32, torch.bfloat16)], ids=str
)
def test_mixed_query_key_and_value_are_cast_to_the_query_or_refused(dtypes):
    query, key, value = (noise(1, 2, 5, 16, dtype=dtype, seed=i) for i, dtype in enumerate(dtypes))
    word = str(dtypes[0]).removeprefix("torch.")
    got = lz.attention(query, key, value)
    assert got.dtype == dtypes[0]
    assert_close(got, lz.attention(query, key.to(dtypes[0]), value.to(dtypes[0])), tolerance("attention", dtypes[0]))
    report = lz.explain("attention", query, key, value)
    assert f"cast:mixed->{word}" in {step.name for step in report.decision.winner.transforms}
    with lz.scoped(allow_adaptation=False), pytest.raises(InvalidInputError) as caught:
        lz.attention(query, key, value)
    assert caught.value.code == "DTYPE_MIXED"


@pytest.mark.req("R-QUANT-08")
@pytest.mark.parametrize("words", [{"allow_adaptation": False}, {"strict_mode": True}], ids=str)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_input_of_another_dtype_is_enough_to_be_cast_or_refused_also_when_the_call_is_hot(odd, words):
    usual = [noise(1, 2, 5, 16, seed=i) for i in range(3)]
    mixed = [t.bfloat16() if i == odd else t for i, t in enumerate(usual)]
    for _ in range(2):  # the second time both are hot: the choice for the one must not serve the other
        assert lz.attention(*usual).dtype == torch.float32
        got = lz.attention(*mixed)
        assert got.dtype == mixed[0].dtype
        exact = torch.nn.functional.scaled_dot_product_attention(*(t.to(mixed[0].dtype).double() for t in mixed))
        assert_close(got.double(), exact, tolerance("attention", mixed[0].dtype))
        with lz.scoped(**words):
            assert lz.attention(*usual).dtype == torch.float32
            with pytest.raises((InvalidInputError, NoKernelFoundError)) as caught:
                lz.attention(*mixed)
            said = {caught.value.code, *(why.code for why in caught.value.reasons)}
            assert {"DTYPE_MIXED", "ADAPTATION_NOT_ALLOWED"} & said


def test_only_the_pages_in_use_are_cast(monkeypatch):
    cache = filled(lens=(9, 5), dtype=torch.bfloat16, num_pages=64)
    sizes = []
    original = torch.Tensor.to

    def counting(self, *args, **kwargs):
        if self.ndim == 4 and self.dtype is torch.bfloat16:
            sizes.append(self.shape[0])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    cache.attend(noise(2, 4, 16), backend="reference")
    assert sizes and max(sizes) == 6  # two sequences of up to three pages, of 64


def test_a_page_number_that_is_none_is_still_refused_when_pages_are_cast():
    keys = torch.zeros(64, 4, 2, 16, dtype=torch.bfloat16)
    batch = lz.paged_batch(torch.tensor([[3, -1]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    with pytest.raises(Exception, match=r"(?i)index|out of range|page"):
        lz.paged_attention(noise(1, 4, 16), keys, keys, batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decode_loop_stays_hot(strategy):
    cache, query, token = filled(strategy, (9, 9), max_len=64, chunk_size=64), noise(2, 4, 16), noise(2, 2, 16)
    for _ in range(3):
        cache.append(token, token)
        cache.attend(query)
    state.counters.reset()
    for _ in range(20):
        cache.append(token, token)
        cache.attend(query)
    assert state.counters.selections <= 2  # a bucket or two end on the way to 32 tokens


# -- refusals ----------------------------------------------------------------------------------------
@pytest.mark.req("R-KV-05")
@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.append(noise(2, 2, 1, 16).half(), noise(2, 2, 1, 16)), "KV_CACHE_DTYPE_MISMATCH"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16).bfloat16()), "KV_CACHE_DTYPE_MISMATCH"),
        (lambda c: c.append(noise(2, 1, 2, 16), noise(2, 1, 2, 16)), "SHAPE_INVALID"),  # heads and tokens exchanged
        (lambda c: c.append(noise(2, 2, 1, 8), noise(2, 2, 1, 16)), "SHAPE_INVALID"),
        (lambda c: c.append(noise(3, 2, 1, 16), noise(3, 2, 1, 16)), "SHAPE_INVALID"),
        (lambda c: c.append(noise(2, 2, 2, 16), noise(2, 2, 1, 16)), "SHAPE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16), lens=(2, 1)), "SHAPE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16), lens=(1,)), "VALUE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16), lens=(1, -1)), "VALUE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16), layout="HND"), "LAYOUT_UNKNOWN"),
        (lambda c: c.append(noise(2, 16), noise(2, 16)), "RANK_INVALID"),
        (lambda c: c.append([1.0], noise(2, 2, 1, 16)), "TYPE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16), noise(2, 2, 1, 16), layer=1), "VALUE_INVALID"),
        (lambda c: c.append(noise(2, 2, 1, 16).to("meta"), noise(2, 2, 1, 16)), "DEVICE_MIXED"),
        (lambda c: c.attend(noise(2, 4, 16), lens=(1, 2)), "SHAPE_INVALID"),
        (lambda c: c.attend(noise(20, 4, 16), lens=(15, 5)), "SHAPE_INVALID"),  # more than is cached
        (lambda c: c.attend(noise(2, 4, 16), causal=True), "VALUE_INVALID"),
        (lambda c: c.attend(noise(2, 16)), "RANK_INVALID"),
        (lambda c: c.attend(noise(2, 4, 8)), "HEAD_DIM_MISMATCH"),
        (lambda c: c.attend(noise(2, 3, 16)), "GQA_RATIO_INVALID"),
        (lambda c: c.truncate((1,)), "VALUE_INVALID"),
        (lambda c: c.free(2), "VALUE_INVALID"),
        (lambda c: c.fork(0, 0), "VALUE_INVALID"),
        (lambda c: c.to(batch=3), "BATCH_MISMATCH"),
        (lambda c: c.to(strategy="contiguous").pages(), "VALUE_INVALID"),
        (lambda c: c.to(strategy="chunked").paged_batch(), "VALUE_INVALID"),
        (lambda c: c.to(quant="fp8_e4m3").pages(), "QUANT_SCALE_LAYOUT"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(call, code):
    cache = filled()
    before = [cache.tokens(seq)[0] for seq in range(2)]
    with pytest.raises(InvalidInputError) as caught:
        call(cache)
    assert caught.value.code == code
    assert caught.value.reasons[0].value is not None
    assert all(torch.equal(cache.tokens(seq)[0], tokens) for seq, tokens in enumerate(before))


@pytest.mark.req("R-KV-05", "R-QUANT-05")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"strategy": "virtual"}, "VALUE_INVALID"),
        ({"layout": "BHSD"}, "LAYOUT_UNKNOWN"),
        ({"max_len": None}, "VALUE_INVALID"),
        ({"batch": 0}, "VALUE_INVALID"),
        ({"page_size": True}, "VALUE_INVALID"),
        ({"num_pages": 0}, "VALUE_INVALID"),
        ({"dtype": torch.int8}, "DTYPE_UNSUPPORTED"),
        ({"quant": "int3"}, "QUANT_FORMAT_UNSUPPORTED"),
        ({"quant": "nvfp4"}, "QUANT_FORMAT_UNSUPPORTED"),
        ({"quant": "mxfp4"}, "DIM_NOT_MULTIPLE"),
        ({"quant": "int8", "k_scale": 0.1, "v_scale": 0.1}, "QUANT_SCALE_LAYOUT"),
        ({"quant": "fp8_e4m3", "k_scale": 0.1}, "QUANT_SCALE_LAYOUT"),
        ({"k_scale": 0.1, "v_scale": 0.1}, "QUANT_SCALE_LAYOUT"),
        ({"quant": "fp8_e4m3", "k_scale": 0.0, "v_scale": 0.1}, "SCALE_INVALID"),
        ({"quant": "fp8_e4m3", "k_scale": math.nan, "v_scale": 0.1}, "SCALE_INVALID"),
    ],
)
def test_a_cache_that_means_nothing_is_not_made(options, code):
    with pytest.raises(InvalidInputError) as caught:
        make(**options)
    assert caught.value.code == code


def test_nothing_in_a_cache_carries_a_gradient():
    cache = make()
    token = noise(2, 2, 1, 16).requires_grad_()
    cache.append(token, token)
    assert not any(part.requires_grad for part in cache.tokens(0))
    query = noise(2, 4, 16).requires_grad_()
    cache.attend(query).sum().backward()  # the query may
    assert query.grad is not None and token.grad is None


def test_a_poisoned_token_stays_visible_in_an_fp8_cache():
    for options in ({"quant": "fp8_e4m3"}, FIXED):
        cache = make(**options)
        bad = noise(2, 2, 1, 16)
        bad[0, 0, 0, 3] = math.inf
        cache.append(bad, noise(2, 2, 1, 16))
        assert not cache.tokens(0)[0].isfinite().all() and cache.tokens(1)[0].isfinite().all()


def test_a_cache_says_what_it_is():
    text = repr(filled(quant="fp8_e4m3"))
    assert all(word in text for word in ("paged", "2 sequences", "fp8_e4m3", "NHD", "[9, 5]"))
