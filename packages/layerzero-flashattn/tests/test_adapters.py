"""FlashAttention 2 and 3 are built from source and run nowhere here: their adapters meet stand-ins whose functions take
exactly what the recorded signatures of the real libraries take."""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.reference.attention import attention as reference
from layerzero.backends.reference.varlen import paged_attention, varlen_attention
from layerzero.model.kv_cache import make_paged_batch
from layerzero_flashattn.interface import dense


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected):
    assert found.shape == expected.shape
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-6, atol=1e-6)


OPTIONS = {
    "plain": (False, None, None, None),
    "causal": ("bottom_right", None, None, None),
    "window": (False, 0.3, (2, 1), None),
    "causal_window": ("bottom_right", None, (3, 0), None),
    "softcap": ("bottom_right", None, None, 4.0),
    "negative_scale": ("bottom_right", -0.5, None, None),
    "zero_scale": ("bottom_right", 0.0, None, None),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_says_what_it_means_in_the_librarys_words(generation, name, deterministic):
    causal, scale, window, softcap = OPTIONS[name]
    q, k, v = randn(2, 7, 4, 8), randn(2, 5, 2, 8, seed=1), randn(2, 5, 2, 8, seed=2)
    run = generation.kernels.deterministic_attention if deterministic else generation.kernels.attention
    out, lse = run(q, k, v, None, 0.0, causal, scale, window, softcap, None, True)
    alone = run(q, k, v, None, 0.0, causal, scale, window, softcap, None, False)
    expected, expected_lse = reference(
        *(t.transpose(1, 2) for t in (q, k, v)), None, 0.0, causal, scale, window, softcap, None, True
    )
    close(out, expected.transpose(1, 2))
    close(alone, out)
    close(lse, expected_lse)
    _, given = generation.library.calls[-1]
    assert given["deterministic"] is deterministic
    assert given["softmax_scale"] is None or given["softmax_scale"] > 0.0
    if scale is None:
        assert given["q"].data_ptr() == q.data_ptr(), "the query was copied"


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(generation, name):
    causal, scale, window, softcap = OPTIONS[name]
    offsets_q, offsets_k = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 4, 6, 6])  # the last has no keys
    q, k, v = randn(9, 4, 8), randn(6, 2, 8, seed=1), randn(6, 2, 8, seed=2)
    call = (q, k, v, offsets_q, offsets_k, 6, 4, causal, scale, window, softcap, None)
    expected, expected_lse = varlen_attention(*call, True)
    out, lse = generation.kernels.varlen_attention(*call, True)
    close(out, expected)
    close(lse, expected_lse)
    close(generation.kernels.deterministic_varlen_attention(*call, False), expected)
    assert generation.library.calls[-1][1]["deterministic"] is True


def test_no_keys_at_all(generation):
    q, none = randn(3, 4, 8), randn(0, 2, 8)
    call = (q, none, none, torch.tensor([0, 3]), torch.tensor([0, 0]), 3, 0, "bottom_right", None, None, None, None)
    out, lse = generation.kernels.varlen_attention(*call, True)
    assert not out.any() and (lse == -torch.inf).all() and generation.library.calls == []
    assert not generation.kernels.varlen_attention(*call, False).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_paged_cache(generation, prefill, dtype):
    page = 4
    cache = [randn(12, page, 2, 8, seed=seed) for seed in (1, 2)]
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).to(dtype)
    queries = torch.tensor([2, 1, 5], dtype=dtype) if prefill else None
    batch = make_paged_batch(tables, torch.tensor([3, 9, 14], dtype=dtype), queries)
    query = randn(batch.total_q, 4, 8)
    run = generation.kernels.paged_prefill if prefill else generation.kernels.paged_decode
    for scale, window, softcap in ((None, None, None), (-0.3, (4, 0), 3.0)):
        expected, expected_lse = paged_attention(query, *cache, batch, scale, window, softcap, None, True, "NHD")
        out, lse = run(query, *cache, batch, scale, window, softcap, None, True, "NHD")
        close(out, expected)
        close(lse, expected_lse)
        close(run(query, *cache, batch, scale, window, softcap, None, False, "NHD"), expected)


def test_alibi_slopes_reach_flash_attention_2_in_float32(generation):
    if generation.name != "fa2":
        pytest.skip("only FlashAttention 2 knows ALiBi")
    q, k, v = randn(2, 5, 4, 8), randn(2, 6, 4, 8, seed=1), randn(2, 6, 4, 8, seed=2)
    slopes = torch.rand(4, dtype=torch.float64)
    out = generation.kernels.attention(q, k, v, None, 0.0, False, None, None, None, slopes, False)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    expected = reference(*heads_first, None, 0.0, False, None, None, None, slopes.float(), False)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)
    assert generation.library.calls[-1][1]["alibi_slopes"].dtype is torch.float32


def test_an_early_build_of_flash_attention_3_returns_the_lse_unasked(generation):
    if generation.name != "fa3":
        pytest.skip("about FlashAttention 3")
    q, k, v = (randn(1, 4, 2, 8, seed=seed) for seed in range(3))
    new = generation.kernels.attention(q, k, v, None, 0.0, False, None, None, None, None, True)

    def early(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
        return new

    attention = dense(early)
    out, lse = attention(q, k, v, None, 0.0, False, None, None, None, None, True)
    assert out is new[0] and lse is new[1]
    assert attention(q, k, v, None, 0.0, False, None, None, None, None, False) is new[0]


def test_a_build_of_flash_attention_3_that_cannot_give_the_lse_says_so(generation):
    """Its bare tensor must not be taken for a pair: the first sequence of the batch would pass for the result."""
    if generation.name != "fa3":
        pytest.skip("about FlashAttention 3")
    q, k, v = (randn(2, 4, 2, 8, seed=seed) for seed in range(3))
    with pytest.raises(RuntimeError, match="no log-sum-exp"):
        dense(lambda q, k, v, **options: q)(q, k, v, None, 0.0, False, None, None, None, None, True)
