"""Native attention over pages: both layouts, every page size, decode and mixed batches, and refusals."""

from __future__ import annotations

import random

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.varlen import paged_attention as reference
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.numerics.tolerances import tolerance
from layerzero_cpu.paged import paged_attention


def cache(
    rng: random.Random, dtype: torch.dtype, layout: str, page: int, contexts: list[int], heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages in random order, and the table that finds them; unused pages hold NaN, which must never be read."""
    torch.manual_seed(rng.randrange(1 << 30))
    width = max(1, *(-(-length // page) for length in contexts))
    blocks = len(contexts) * width + 3
    shape = (blocks, page, heads, dim) if layout == "NHD" else (blocks, heads, page, dim)
    keys, values = (torch.full(shape, torch.nan).to(dtype) for _ in range(2))
    table = torch.randperm(blocks)[: len(contexts) * width].view(len(contexts), width)
    for row, length in enumerate(contexts):
        for number in table[row, : -(-length // page)].tolist():
            keys[number], values[number] = torch.randn(shape[1:]).to(dtype), torch.randn(shape[1:]).to(dtype)
    return keys, values, table


@pytest.mark.req("R-BK-CPU-05")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 7, 16, 32, 128])
def test_decode_matches_the_reference(layout: str, page: int) -> None:
    rng = random.Random(page)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        contexts = [1, rng.randint(2, 40), 129, 0, 600]
        keys, values, table = cache(rng, dtype, layout, page, contexts, 2, 64)
        index = rng.choice([torch.int32, torch.int64])
        batch = make_paged_batch(table.to(index), torch.tensor(contexts, dtype=index))
        query = torch.randn(len(contexts), 6, 64).to(dtype)
        window, softcap = rng.choice([None, (50, 0)]), rng.choice([None, 15.0])
        slopes = rng.choice([None, torch.rand(6), torch.rand(len(contexts), 6)])
        args = (query, keys, values, batch, None, window, softcap, slopes, True, layout)
        (found, lse), (wanted, wanted_lse) = paged_attention(*args), reference(*args)
        bound = tolerance("paged_attention", dtype)
        torch.testing.assert_close(found, wanted, rtol=bound.rtol, atol=bound.atol)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("lengths", [[1, 3, 1], [40, 1, 70], [0, 90, 2]])
def test_mixed_batches_match_the_reference(layout: str, lengths: list[int]) -> None:
    rng = random.Random(sum(lengths))
    for dtype in (torch.float32, torch.bfloat16):
        contexts = [length + rng.randint(0, 200) for length in lengths]
        keys, values, table = cache(rng, dtype, layout, 16, contexts, 2, 40)
        batch = make_paged_batch(table, torch.tensor(contexts), torch.tensor(lengths))
        query = torch.randn(sum(lengths), 4, 40).to(dtype)
        args = (query, keys, values, batch, 0.2, None, None, None, True, layout)
        (found, lse), (wanted, wanted_lse) = paged_attention(*args), reference(*args)
        bound = tolerance("paged_attention", dtype)
        torch.testing.assert_close(found, wanted, rtol=bound.rtol, atol=bound.atol)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


def test_the_public_function_takes_it() -> None:
    rng = random.Random(3)
    keys, values, table = cache(rng, torch.float32, "NHD", 16, [33, 70], 2, 64)
    contexts, query = torch.tensor([33, 70]), torch.randn(2, 8, 64)
    found = lz.paged_attention(query, keys, values, table, contexts, backend="cpu.paged_attention.flash")
    wanted = lz.paged_attention(query, keys, values, table, contexts, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [-1, 9])
def test_a_page_outside_the_cache_is_refused(number: int) -> None:
    keys, table = torch.zeros(9, 4, 1, 16), torch.tensor([[0, number]])
    batch = make_paged_batch(table, torch.tensor([8]))
    with pytest.raises(ValueError, match="page number"):
        paged_attention(torch.zeros(1, 2, 16), keys, keys, batch, None, None, None, None, False, "NHD")


def test_lengths_that_lie_are_refused() -> None:
    keys, table, length = torch.zeros(9, 4, 1, 16), torch.tensor([[0, 1]]), torch.tensor([8])
    for contexts, queries, word in (([9], [1], "row of pages"), ([8], [3], "tokens"), ([-2], [1], "negative")):
        batch = PagedBatch(table, torch.tensor(contexts), torch.tensor(queries), (8,), (1,))
        with pytest.raises(ValueError, match=word):
            paged_attention(torch.zeros(1, 2, 16), keys, keys, batch, None, None, None, None, False, "NHD")
    assert make_paged_batch(table, length).is_decode
