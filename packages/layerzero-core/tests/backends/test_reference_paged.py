"""The reference paged attention against contiguous attention of the same tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.backends.reference.attention import attention
from layerzero.backends.reference.varlen import paged_attention
from layerzero.errors import InvalidInputError
from layerzero.model.kv_cache import make_paged_batch
from layerzero.numerics import assert_close, tolerance
from layerzero.reasons import ReasonCode


def scene(contexts, queries, *, page=4, heads=4, kv_heads=2, dim=8, dtype=torch.float32, index=torch.int32, seed=0):
    """Contiguous K/V of each sequence, and the same tokens scattered over shuffled pages of a cache full of NaN."""
    gen = torch.Generator().manual_seed(seed)
    width = max(-(-n // page) for n in contexts) + 1
    order = torch.randperm(len(contexts) * width + 3, generator=gen)
    caches = [torch.full((len(order), page, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    table = torch.full((len(contexts), width), -1, dtype=index)  # -1: a slot nobody may read
    keys, values = [], []
    for row, length in enumerate(contexts):
        pages = order[row * width : row * width + -(-length // page)]
        table[row, : len(pages)] = pages.to(index)
        for cache, kept in zip(caches, (keys, values), strict=True):
            tokens = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
            kept.append(tokens)
            for t in range(length):
                cache[pages[t // page], t % page] = tokens[t]
    query = torch.randn(sum(queries), heads, dim, generator=gen).to(dtype)
    batch = make_paged_batch(
        table, torch.tensor(contexts, dtype=index), None if set(queries) == {1} else torch.tensor(queries, dtype=index)
    )
    return query, caches[0], caches[1], batch, keys, values


def paged(q, kc, vc, batch, *, scale=None, window=None, softcap=None, alibi=None, lse=False, layout="NHD"):
    return paged_attention(q, kc, vc, batch, scale, window, softcap, alibi, lse, layout)


def each_alone(q, keys, values, queries):
    """SDPA in float64, sequence by sequence, with an explicit bottom-right mask."""
    outs, start = [], 0
    for k, v, n in zip(keys, values, queries, strict=True):
        mask = torch.ones(n, len(k)).tril(len(k) - n).bool()
        heads_first = (t.double().transpose(0, 1) for t in (q[start : start + n], k, v))
        outs.append(F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(0, 1))
        start += n
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.req("R-OP-07", "R-KV-02")
def test_decode_with_variable_context_lengths_matches_sdpa(dtype, index, layout):
    contexts, queries = [1, 4, 5, 13], [1, 1, 1, 1]
    q, kc, vc, batch, keys, values = scene(contexts, queries, dtype=dtype, index=index)
    if layout == "HND":
        kc, vc = kc.transpose(1, 2).contiguous(), vc.transpose(1, 2).contiguous()
    out = paged(q, kc, vc, batch, layout=layout)
    assert out.dtype == dtype and out.shape == q.shape
    assert_close(out, each_alone(q, keys, values, queries), tolerance("paged_attention", dtype))


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.req("R-OP-07")
def test_chunked_prefill_and_decode_in_one_batch(page):
    contexts, queries = [7, 12, 9, 1], [7, 3, 1, 1]
    q, kc, vc, batch, keys, values = scene(contexts, queries, page=page)
    assert_close(paged(q, kc, vc, batch), each_alone(q, keys, values, queries), tolerance("attention", "float32"))


def test_options_mean_what_they_mean_in_attention():
    contexts, queries = [9, 6], [4, 6]
    q, kc, vc, batch, keys, values = scene(contexts, queries)
    slopes = torch.stack((lz.alibi_slopes(4), 2 * lz.alibi_slopes(4)))
    out, lse = paged(q, kc, vc, batch, scale=0.4, window=(3, 0), softcap=2.0, alibi=slopes, lse=True)
    assert lse.shape == (10, 4) and lse.dtype == torch.float32
    start = 0
    for row, (k, v, n) in enumerate(zip(keys, values, queries, strict=True)):
        parts = [t.transpose(0, 1)[None] for t in (q[start : start + n], k, v)]
        want, want_lse = attention(*parts, None, 0.0, "bottom_right", 0.4, (3, 0), 2.0, slopes[row], True)
        assert torch.equal(out[start : start + n], want[0].transpose(0, 1))
        assert torch.equal(lse[start : start + n], want_lse[0].transpose(0, 1))
        start += n


def test_padding_rows_and_sequences_without_queries():
    q, kc, vc, batch, keys, values = scene([5, 4, 6], [2, 0, 1])
    assert_close(paged(q, kc, vc, batch), each_alone(q, keys, values, [2, 0, 1]), tolerance("attention", "float32"))
    empty = make_paged_batch(batch.block_tables, torch.tensor([0, 0, 0]))
    out, lse = paged(q, kc, vc, empty, lse=True)
    assert torch.count_nonzero(out) == 0
    assert (lse == -float("inf")).all()


def test_an_empty_batch_gives_an_empty_result():
    batch = make_paged_batch(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    out, lse = paged(torch.zeros(0, 4, 8), torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8), batch, lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


def test_a_context_longer_than_its_pages_is_refused():
    q, kc, vc, batch, *_ = scene([5], [1])
    too_long = make_paged_batch(batch.block_tables, torch.tensor([99]))
    with pytest.raises(InvalidInputError, match="99") as caught:
        paged(q, kc, vc, too_long)
    assert caught.value.code is ReasonCode.BLOCK_TABLE_INVALID


def test_a_wrong_number_of_query_tokens_is_refused():
    q, kc, vc, batch, *_ = scene([5, 5], [1, 1])
    with pytest.raises(InvalidInputError, match="2 packed query tokens"):
        paged(q[:1], kc, vc, batch)


@pytest.mark.parametrize("page", [-1, 10_000])
def test_a_page_number_outside_the_cache_never_reads_another_page(page):
    q, kc, vc, batch, *_ = scene([5], [1])
    batch.block_tables[0, 0] = page
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        paged(q, kc, vc, batch)


def test_is_traceable_in_one_graph():
    q, kc, vc, batch, *_ = scene([5, 2], [1, 1])
    traced = torch.compile(paged, fullgraph=True, backend="eager", dynamic=False)
    assert torch.equal(traced(q, kc, vc, batch), paged(q, kc, vc, batch))
