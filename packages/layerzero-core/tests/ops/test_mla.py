"""Latent attention over pages, against attention with all heads written out in float64."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero.runtime.state import state

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
EXAMPLES = 300 if PROVE else 25
SCALE = 1 / math.sqrt(128 + 64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def as_they_come():
    """The kernel that is chosen answers the first call too: two calls are compared, and pages are full of NaN here."""
    lz.configure(on_first_use="off")
    yield
    lz.reset()


def scene(
    contexts,
    queries=None,
    *,
    heads=4,
    ckv=16,
    kpe=4,
    page=4,
    dtype=torch.float32,
    index=torch.int32,
    device="cpu",
    seed=0,
):
    """Latent vectors and rotated keys of each sequence, and the same scattered over shuffled pages full of NaN."""
    gen = torch.Generator().manual_seed(seed)
    queries = [1] * len(contexts) if queries is None else queries
    width = max((-(-n // page) for n in contexts), default=0) + 1
    order = torch.randperm(len(contexts) * width + 2, generator=gen)
    caches = [torch.full((len(order), page, size), math.nan, dtype=dtype) for size in (ckv, kpe)]
    table = torch.full((len(contexts), width), -1, dtype=index)  # -1: a slot nobody may read
    tokens = []
    for row, length in enumerate(contexts):
        pages = order[row * width : row * width + -(-length // page)]
        table[row, : len(pages)] = pages.to(index)
        kept = [torch.randn(length, size, generator=gen).to(dtype) for size in (ckv, kpe)]
        for cache, part in zip(caches, kept, strict=True):
            for t in range(length):
                cache[pages[t // page], t % page] = part[t]
        tokens.append(kept)
    q = [torch.randn(sum(queries), heads, size, generator=gen).to(dtype).to(device) for size in (ckv, kpe)]
    lens = torch.tensor(contexts, dtype=index, device=device)
    new = torch.tensor(queries, dtype=index, device=device)
    batch = lz.paged_batch(table.to(device), lens, query_lens=None if set(queries) <= {1} else new)
    return *q, *(cache.to(device) for cache in caches), batch, tokens


def all_heads(q_nope, q_pe, tokens, queries, scale=SCALE):
    """Plain multi-head attention: every head gets its own copy of key [latent, rotated] and value [latent]."""
    heads, start = q_nope.shape[1], 0
    outs, lses = [], []
    for (latent, rotated), n in zip(tokens, queries, strict=True):
        key = torch.cat((latent, rotated), dim=1).double().expand(heads, -1, -1)
        value = latent.double().expand(heads, -1, -1)
        query = torch.cat((q_nope, q_pe), dim=2)[start : start + n].double().cpu().transpose(0, 1)
        scores = scale * query @ key.mT
        future = torch.ones(n, len(latent)).triu(len(latent) - n + 1).bool()
        weights = torch.exp(scores).masked_fill(future, 0.0)
        total = weights.sum(-1)
        outs.append((weights @ value / total.clamp_min(1e-300)[..., None]).transpose(0, 1))
        lses.append(total.log().T)
        start += n
    return torch.cat(outs), torch.cat(lses)


def run(q_nope, q_pe, ckv, kpe, batch, scale=SCALE, **options):
    return lz.mla_paged_attention(q_nope, q_pe, ckv, kpe, batch, scale=scale, **options)


def check(contexts, queries=None, scale=SCALE, **options):
    *args, tokens = scene(contexts, queries, **options)
    out, lse = run(*args, scale=scale, return_lse=True)
    want, want_lse = all_heads(*args[:2], tokens, [1] * len(contexts) if queries is None else queries, scale)
    dtype = args[0].dtype
    assert out.dtype == dtype and out.shape == args[0].shape
    assert lse.dtype == torch.float32 and lse.shape == args[0].shape[:2]
    alone = run(*args, scale=scale)
    assert_close(out.cpu(), want, tolerance("mla_paged_attention", dtype))
    assert_close(alone.cpu(), want, tolerance("mla_paged_attention", dtype))
    assert out.is_cuda or torch.equal(out, alone)  # on a GPU another kernel may serve the call without the LSE
    assert_close(lse.cpu(), want_lse, tolerance("mla_paged_attention", dtype))


@pytest.mark.req("R-OP-07")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_decode_with_variable_context_lengths(dtype, index, device):
    check([1, 4, 5, 13], dtype=dtype, index=index, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("contexts", "queries"), [([7, 12, 9], [7, 12, 9]), ([7, 12, 9, 1], [7, 3, 1, 1])], ids=["prefill", "mixed"]
)
def test_prefill_is_causal_and_aligned_to_the_end(contexts, queries, dtype, device):
    check(contexts, queries, dtype=dtype, device=device)


@pytest.mark.parametrize("page", [1, 2, 16, 32, 64, 128])
def test_page_sizes(page):
    check([page + 1, 2 * page, 3], [2, 1, 3], page=page)


@pytest.mark.parametrize("device", DEVICES)
def test_the_shape_of_deepseek(device):
    check([70, 33], [3, 1], heads=128, ckv=512, kpe=64, page=64, device=device)


def test_the_latent_form_is_the_models_own_attention():
    """DeepSeek's formula before absorption: keys and values of every head projected up from the latent vectors."""
    gen = torch.Generator().manual_seed(3)
    heads, ckv, kpe, nope, dim_v, contexts, queries = 3, 16, 4, 8, 6, [9, 5], [4, 1]
    _, q_pe, ckv_cache, kpe_cache, batch, tokens = scene(
        contexts, queries, heads=heads, ckv=ckv, kpe=kpe, dtype=torch.float64
    )
    up_k, up_v = (torch.randn(heads, size, ckv, generator=gen, dtype=torch.float64) for size in (nope, dim_v))
    q = torch.randn(sum(queries), heads, nope, generator=gen, dtype=torch.float64)
    want, start = [], 0
    for (latent, rotated), n in zip(tokens, queries, strict=True):
        keys = torch.cat((torch.einsum("tc,hnc->htn", latent, up_k), rotated.expand(heads, -1, -1)), dim=-1)
        values = torch.einsum("tc,hvc->htv", latent, up_v)
        query = torch.cat((q, q_pe), dim=-1)[start : start + n].transpose(0, 1)
        mask = torch.ones(n, len(latent)).tril(len(latent) - n).bool()
        scale = 1 / math.sqrt(nope + kpe)
        want.append(
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale).transpose(0, 1)
        )
        start += n
    absorbed = torch.einsum("thn,hnc->thc", q, up_k)
    out = run(absorbed, q_pe, ckv_cache, kpe_cache, batch, scale=1 / math.sqrt(nope + kpe))
    assert_close(torch.einsum("thc,hvc->thv", out, up_v), torch.cat(want), tolerance("attention", torch.float64))


def test_padding_rows_sequences_without_queries_and_empty_batches():
    check([5, 4, 6], [2, 0, 1])
    *args, _ = scene([0, 0])
    out, lse = run(*args, return_lse=True)
    assert torch.count_nonzero(out) == 0 and torch.isneginf(lse).all()
    *args, _ = scene([])
    out, lse = run(*args, return_lse=True)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_gradients_by_finite_differences():
    *args, _ = scene([2, 3], [1, 2], heads=2, ckv=2, kpe=1, page=3, dtype=torch.float64)
    leaves = [t.nan_to_num(0.0).requires_grad_() for t in args[:4]]
    assert torch.autograd.gradcheck(lambda *t: run(*t, args[4], scale=0.6), leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_equal_those_of_all_heads(dtype):
    queries = [3, 2]
    *args, tokens = scene([3, 6], queries, page=8, dtype=dtype)  # one page each: its rows are the tokens
    leaves = [t.detach().nan_to_num(0.0).requires_grad_() for t in args[:4]]
    weight = torch.linspace(-1, 1, args[0].numel()).reshape(args[0].shape).to(dtype)
    got = torch.autograd.grad((run(*leaves, args[4]) * weight).sum(), leaves)
    wide = [t.detach().double().requires_grad_() for t in args[:2]]
    flat = [[t.double().requires_grad_() for t in pair] for pair in tokens]
    want = torch.autograd.grad(
        (all_heads(*wide, flat, queries)[0] * weight).sum(), [*wide, *(t for pair in flat for t in pair)]
    )
    limit = Tolerance(1e-4, 1e-5) if dtype is torch.float32 else Tolerance(1e-2, 1e-2)
    assert_close(list(got[:2]), list(want[:2]), limit)
    for row, length in enumerate((3, 6)):
        page = args[4].block_tables[row, 0]
        for which in (0, 1):
            assert_close(got[2 + which][page, :length], want[2 + 2 * row + which], limit)


# -- properties ------------------------------------------------------------------------------------
@st.composite
def lengths(draw):
    contexts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    return contexts, [draw(st.integers(0, min(n, 5))) for n in contexts]


quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(
    lens=lengths(),
    heads=st.integers(1, 5),
    ckv=st.sampled_from([1, 7, 16]),
    kpe=st.sampled_from([0, 1, 6]),
    page=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, *DTYPES]),
    index=st.sampled_from([torch.int32, torch.int64]),
    scale=st.floats(-1, 1),
)
def test_any_lengths_widths_and_pages(lens, heads, ckv, kpe, page, dtype, index, scale):
    check(*lens, scale, heads=heads, ckv=ckv, kpe=kpe, page=page, dtype=dtype, index=index)


@quick
@given(lens=lengths(), value=st.sampled_from([0.0, 1e-40, 1e4, -1e4]), where=st.integers(0, 3))
def test_extreme_inputs_stay_inside_the_latent_vectors_they_average(lens, value, where):
    *args, tokens = scene(*lens)
    args[where] = torch.where(args[where].isnan(), args[where], value)
    out, start = run(*args), 0
    for (latent, _), n in zip(tokens, lens[1], strict=True):
        seen = torch.full_like(latent, value) if where == 2 else latent
        margin = 1e-3 + 1e-3 * seen.abs().max()
        part = out[start : start + n]
        assert ((part >= seen.amin(0) - margin) & (part <= seen.amax(0) + margin)).all()
        start += n


def test_strided_queries_and_caches():
    *args, _ = scene([5, 9], [2, 1])
    apart = [torch.cat((t, t), dim=-1)[..., : t.shape[-1]] for t in args[:4]]
    assert not apart[0].is_contiguous()
    assert torch.equal(run(*apart, args[4]), run(*args))


# -- dispatch and refusals -------------------------------------------------------------------------
def test_a_decode_loop_stays_hot_while_its_contexts_grow(clean):
    *args, _ = scene([40, 40], page=64)
    for length in range(33, 60):
        batch = lz.paged_batch(args[4].block_tables, torch.tensor([length, length], dtype=torch.int32))
        lz.mla_paged_attention(*args[:2], *(t.nan_to_num(0.0) for t in args[2:4]), batch, scale=1.0)
    assert state.counters.misses == 1


def bad(position=None, value=None, **options):
    *args, _ = scene([5, 3])
    if position is not None:
        args[position] = value(args[position])
    return lambda: run(*args, **options)


BAD = {
    "query of rank 4": (bad(0, lambda t: t[None]), "RANK_INVALID"),
    "cache of rank 4": (bad(2, lambda t: t[:, :, None]), "RANK_INVALID"),
    "text": (bad(1, lambda t: "q_pe"), "TYPE_INVALID"),
    "no batch": (bad(4, lambda t: t.block_tables), "TYPE_INVALID"),
    "integers": (bad(0, lambda t: t.int()), "DTYPE_UNSUPPORTED"),
    "heads of q_pe": (bad(1, lambda t: t[:, :2]), "SHAPE_INVALID"),
    "pages of kpe": (bad(3, lambda t: t[:2]), "SHAPE_INVALID"),
    "width of the latent": (bad(0, lambda t: t[..., :3]), "HEAD_DIM_MISMATCH"),
    "width of the rotated": (bad(3, lambda t: t[..., :3]), "HEAD_DIM_MISMATCH"),
    "another cache dtype": (bad(3, lambda t: t.half()), "KV_CACHE_DTYPE_MISMATCH"),
    "tokens": (bad(4, lambda b: lz.paged_batch(b.block_tables[:1], b.context_lens[:1])), "SHAPE_INVALID"),
    "a context longer than its pages": (
        bad(4, lambda b: lz.paged_batch(b.block_tables, torch.tensor([99, 3]))),
        "BLOCK_TABLE_INVALID",
    ),
    "device": (bad(1, lambda t: t.to("meta")), "DEVICE_MIXED"),
    "NaN scale": (bad(scale=math.nan), "SCALE_INVALID"),
    "no scale": (bad(scale=None), "TYPE_INVALID"),
}


@pytest.mark.req("R-OP-07", "R-KV-05")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_hot_and_cold(name):
    call, code = BAD[name]
    bad()()
    for _ in range(2):
        with pytest.raises(lz.errors.InvalidInputError) as caught:
            call()
        assert caught.value.code == code


@pytest.mark.parametrize("page", [-1, 10_000])
def test_a_page_number_outside_the_cache_never_reads_another_page(page):
    *args, _ = scene([5])
    args[4].block_tables[0, 0] = page
    with pytest.raises(lz.errors.InvalidInputError, match=f"page {page} of row 0") as caught:
        run(*args)
    assert caught.value.code == "BLOCK_TABLE_INVALID"


@pytest.mark.req("R-QUANT-08")
def test_a_cache_of_another_dtype_has_no_kernel_yet_and_says_so():
    *args, _ = scene([5])
    args[2:4] = [t.to(torch.float8_e4m3fn) for t in args[2:4]]
    with pytest.raises(lz.errors.NoKernelFoundError, match="KV_CACHE_DTYPE_MISMATCH"):
        run(*args)
