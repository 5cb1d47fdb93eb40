"""Sinks, scales of a cache and non-causal pages: newer arguments of attention, against formulas written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.errors import InvalidInputError, PlanMismatchError


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, keep: Tensor | None = None) -> Any:
    """[B, H, S, D] in float64: the scores get one more column, whose weight is thrown away."""
    q, k, v, s = (item.double() for item in (query, key, value, sinks))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k.repeat_interleave(group, 1))
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    scores = torch.cat((scores, s[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1)
    return out, scores.logsumexp(-1)


def _drawn(seed: int = 0, heads: int = 4, kv_heads: int = 2, rows: int = 9, cols: int = 23) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, rows, 16), (2, kv_heads, cols, 16), (2, kv_heads, cols, 16))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, torch.linspace(-2.0, 4.0, heads)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("backend", [None, "reference", "sdpa"])
def test_dense_sinks_join_the_denominator(layout: str, backend: str | None) -> None:
    query, key, value, sinks = _drawn()
    out, lse = _with_sinks(query, key, value, sinks)
    given = (t if layout == "BHSD" else t.transpose(1, 2) for t in (query, key, value))
    got, got_lse = lz.attention(*given, sinks=sinks, layout=layout, return_lse=True, backend=backend)
    torch.testing.assert_close(got if layout == "BHSD" else got.transpose(1, 2), out.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got_lse, lse.float(), atol=2e-6, rtol=1e-5)


def test_one_head_without_an_axis_for_it() -> None:
    query, key, value, _ = _drawn(heads=1, kv_heads=1)
    sinks = torch.tensor([0.5])
    got = lz.attention(query[:, 0], key[:, 0], value[:, 0], sinks=sinks)
    torch.testing.assert_close(got, _with_sinks(query, key, value, sinks)[0][:, 0].float(), atol=2e-6, rtol=1e-5)


def test_sinks_of_minus_infinity_change_nothing() -> None:
    query, key, value, _ = _drawn()
    keep = torch.ones(9, 23, dtype=torch.bool)
    keep[3] = False  # a row without any key
    none = torch.full((4,), -torch.inf)
    for backend in (None, "reference", "sdpa"):
        got = lz.attention(query, key, value, keep, sinks=none, backend=backend)
        torch.testing.assert_close(
            got, lz.attention(query, key, value, keep, backend="reference"), atol=2e-6, rtol=1e-5
        )


def test_gradients_reach_the_sinks() -> None:
    query, key, value, sinks = (item.double().requires_grad_() for item in _drawn(rows=5, cols=5))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    grad = torch.randn(2, 4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad(_with_sinks(query, key, value, sinks, keep)[0], (query, key, value, sinks), grad)
    narrow = [item.detach().float().requires_grad_() for item in (query, key, value, sinks)]
    out = lz.attention(*narrow[:3], is_causal=True, sinks=narrow[3])
    found = torch.autograd.grad(out, narrow, grad.float())
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right.float(), atol=2e-5, rtol=1e-4)


def test_packed_sinks_and_their_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 7)
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    packed = [torch.randn(13, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.linspace(-1.0, 3.0, 4).requires_grad_()
    got = lz.varlen_attention(*packed, ends, ends, is_causal=True, sinks=sinks)
    wanted, start = [], 0
    for count in lengths:
        parts = (item[start : start + count].transpose(0, 1)[None] for item in packed)
        keep = torch.ones(count, count, dtype=torch.bool).tril()
        wanted.append(_with_sinks(*parts, sinks, keep)[0][0].transpose(0, 1))
        start += count
    want = torch.cat(wanted)
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=1e-5)
    grad = torch.randn(13, 4, 16, generator=generator)
    found, right = (torch.autograd.grad(out, (*packed, sinks), grad.to(out.dtype)) for out in (got, want))
    for left, item in zip(found, right, strict=True):
        torch.testing.assert_close(left, item.float(), atol=2e-5, rtol=1e-4)


def _pages(dtype: torch.dtype = torch.float32, queries: tuple[int, ...] = (3, 1), cross: bool = False) -> Any:
    generator = torch.Generator().manual_seed(2)
    caches = [torch.randn(6, 4, 2, 16, generator=generator).to(dtype) for _ in range(2)]
    table = torch.tensor([[5, 0, 3], [2, 1, 4]], dtype=torch.int32)
    query = torch.randn(sum(queries), 4, 16, generator=generator)
    lengths, new = (torch.tensor(counts, dtype=torch.int32) for counts in ((10, 7), queries))
    batch = lz.paged_batch(table, lengths, query_lens=new, cross=cross)
    return query, *caches, batch


def _sequences(query: Tensor, keys: Tensor, values: Tensor, batch: Any) -> Any:
    start = 0
    for row, (length, count) in enumerate(zip(batch.context_lens_host, batch.query_lens_host, strict=True)):
        parts = (cache[batch.block_tables[row].long()].flatten(0, 1)[:length] for cache in (keys, values))
        yield tuple(item.transpose(0, 1)[None] for item in (query[start : start + count], *parts))
        start += count


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_paged_sinks(backend: str | None, is_causal: bool) -> None:
    given = _pages()
    sinks = torch.linspace(-1.0, 3.0, 4)
    got = lz.paged_attention(*given, sinks=sinks, is_causal=is_causal, backend=backend)
    wanted = []
    for q, k, v in _sequences(*given):
        rows, cols = q.shape[2], k.shape[2]
        keep = torch.ones(rows, cols, dtype=torch.bool)
        wanted.append(_with_sinks(q, k, v, sinks, keep.tril(cols - rows) if is_causal else keep)[0][0].transpose(0, 1))
    torch.testing.assert_close(got, torch.cat(wanted).float(), atol=2e-6, rtol=1e-5)


def test_more_queries_than_context_attend_it_all() -> None:
    """Cross-attention over pages: a decoder's tokens over a short prompt of an encoder."""
    given = _pages(queries=(12, 9), cross=True)
    got = lz.paged_attention(*given, is_causal=False)
    none = torch.full((4,), -torch.inf)
    wanted = torch.cat([_with_sinks(*item, none)[0][0].transpose(0, 1) for item in _sequences(*given)])
    torch.testing.assert_close(got, wanted.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "scale", [0.5, torch.tensor(0.5), torch.tensor([0.5, 1.75])], ids=["number", "tensor", "heads"]
)
def test_scales_of_a_cache(scale: Any, dtype: torch.dtype, backend: str | None) -> None:
    query, keys, values, batch = _pages(dtype)
    sinks = torch.linspace(-1.0, 3.0, 4)
    got = lz.paged_attention(
        query, keys, values, batch, sinks=sinks, is_causal=False, k_scale=scale, v_scale=scale, backend=backend
    )
    factor = torch.as_tensor(scale).reshape(-1, 1)
    plain = _sequences(query, keys.float() * factor, values.float() * factor, batch)
    wanted = torch.cat([_with_sinks(*item, sinks)[0][0].transpose(0, 1) for item in plain])
    torch.testing.assert_close(got, wanted.float(), atol=4e-6, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    query, key, value, sinks = _drawn()
    with pytest.raises(InvalidInputError, match="sinks"):
        lz.attention(query, key, value, sinks=sinks[:2])
    given = _pages()
    with pytest.raises(InvalidInputError, match="k_scale"):
        lz.paged_attention(*given, k_scale=torch.ones(3))
    with pytest.raises(InvalidInputError, match="is_causal"):
        lz.paged_attention(*given, is_causal="bottom_right")  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="is_causal=False"):
        lz.paged_attention(*_pages(queries=(12, 9), cross=True))


def test_a_kernel_without_sinks_and_lse_says_so() -> None:
    query, key, value, sinks = _drawn()
    found = lz.explain("attention", query, key, value, sinks=sinks)
    assert "SINKS_UNSUPPORTED" in str(found).split("sdpa.attention.math")[1].split("sdpa.")[0]


def test_a_plan_with_sinks_keeps_them() -> None:
    query, key, value, sinks = _drawn()
    planned = lz.plan("attention", query, key, value, sinks=sinks)
    torch.testing.assert_close(planned(query, key, value), lz.attention(query, key, value, sinks=sinks))
    without = lz.plan("attention", query, key, value)
    with pytest.raises(PlanMismatchError, match="sinks"):
        without(query, key, value, sinks=sinks)


def test_compiled_calls_take_sinks() -> None:
    query, key, value, sinks = _drawn()

    def program(*given: Tensor) -> Tensor:
        return lz.attention(*given[:3], sinks=given[3]) + 1.0

    found = torch.compile(program, backend="aot_eager", fullgraph=True)(query, key, value, sinks)
    torch.testing.assert_close(found, program(query, key, value, sinks))
    given = _pages()

    def paged(query: Tensor) -> Tensor:
        return lz.paged_attention(query, *given[1:], sinks=sinks, k_scale=0.5, is_causal=False) + 1.0

    torch.testing.assert_close(torch.compile(paged, backend="aot_eager", fullgraph=True)(given[0]), paged(given[0]))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_heads_of_192_and_values_of_128(backend: str | None) -> None:
    """DeepSeek's widths before absorption, with sinks, dense, packed and over pages."""
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(1, 4, rows, 192, generator=generator) for rows in (3, 8))
    value, sinks = torch.randn(1, 4, 8, 128, generator=generator), torch.linspace(-1.0, 3.0, 4)
    want = _with_sinks(query, key, value, sinks)[0].float()
    got = lz.attention(query, key, value, sinks=sinks, backend=backend)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)
    flat = [item[0].transpose(0, 1).contiguous() for item in (query, key, value)]
    ends = [torch.tensor([0, rows], dtype=torch.int32) for rows in (3, 8)]
    packed = lz.varlen_attention(*flat, *ends, sinks=sinks, backend=backend)
    torch.testing.assert_close(packed, want[0].transpose(0, 1), atol=4e-6, rtol=1e-5)
    table, count, new = (torch.tensor(item, dtype=torch.int32) for item in ([[0, 1]], [8], [3]))
    caches = [item.reshape(2, 4, 4, -1) for item in flat[1:]]
    batch = lz.paged_batch(table, count, query_lens=new)
    paged = lz.paged_attention(flat[0], *caches, batch, sinks=sinks, is_causal=False, backend=backend)
    torch.testing.assert_close(paged, want[0].transpose(0, 1), atol=4e-6, rtol=1e-5)
