"""Calls of the attention family from their contexts: dense, paged, packed, grouped and latent."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.masks import block_mask, chunk_mask
from layerzero.tuning.inputs import Draw, lay

__all__ = ["attention", "grouped", "latent", "paged", "varlen"]

Args = tuple[Any, ...]

SOFTCAP = 30.0
_CAUSAL = {Causal.NONE: False, Causal.TOP_LEFT: True, Causal.BOTTOM_RIGHT: "bottom_right"}


def attention(draw: Draw) -> Args:
    """Dense attention, with masks of every kind."""
    ctx, needs = draw.ctx, draw.ctx.needs
    batch, heads, kv_heads = draw.size("batch"), draw.size("num_heads"), draw.size("num_kv_heads")
    dim = draw.size("head_dim")
    rows, cols = related(draw.size("seq_len_q"), draw.size("seq_len_k"), ctx.seq_relation)
    shapes = [
        (batch, heads, rows, dim),
        (batch, kv_heads, cols, dim),
        (batch, kv_heads, cols, draw.size("head_dim_v", dim)),
    ]
    axis = 2
    if ctx.rank == 3:
        shapes, axis = [(shape[0], *shape[2:]) for shape in shapes], 1  # type: ignore[misc]
    elif ctx.layout is Layout.BSHD:
        shapes, axis = [(b, s, h, d) for b, h, s, d in shapes], 1
    # Of the three, keys and values are what usually lies in a larger buffer.
    sliced = math.prod(shapes[1][:axis]) > 1  # a slice along the axis then leaves a gap between rows
    query, key, value = (
        draw.main(*shape, place=place, axis=axis, odd=place > 0 or not sliced) for place, shape in enumerate(shapes)
    )
    dropout = (ctx.dropout_p or 0.1) if ctx.dropout else 0.0
    return (
        query, key, value, _mask(draw, rows, cols), dropout, _CAUSAL[ctx.causal], ctx.scale, ctx.window,
        _softcap(draw), slopes(draw, heads), "lse" in needs,
    )  # fmt: skip


def _softcap(draw: Draw) -> float | None:
    return draw.choice("softcap", SOFTCAP) if "softcap" in draw.ctx.needs else None


def related(rows: int, cols: int, relation: str) -> tuple[int, int]:
    """Lengths that stand in the recorded relation; rounding both up to the ends of buckets may have made them equal."""
    if relation == "equal":
        return min(rows, cols), min(rows, cols)
    if relation == "shorter" and rows >= cols:
        return max(1, cols - 1), max(2, cols)
    if relation == "longer" and rows <= cols:
        return max(2, rows), max(1, rows - 1)
    return rows, cols


def _mask(draw: Draw, rows: int, cols: int) -> Any:
    ctx, sizes = draw.ctx, dict(draw.ctx.dims)
    if "block_mask" in ctx.needs:
        pair = sizes["mask_block_q"], sizes["mask_block_k"]
        blocks = draw.uniform(-(-rows // pair[0]), -(-cols // pair[1])) < 0.6
        if blocks.device.type != "meta":
            blocks[:, 0] = True
        return block_mask(blocks, pair)
    if "chunk_mask" in ctx.needs:
        return chunk_mask(sizes["mask_chunk"])
    if ctx.mask is MaskKind.NONE:
        return None
    if ctx.mask is MaskKind.BOOL:
        found = draw.uniform(rows, cols) < 0.75
        if found.device.type != "meta":
            found[:, 0] = True
        return found
    bias = draw.normal(rows, cols, dtype=draw.dtype())
    return bias.requires_grad_() if "mask_grad" in ctx.needs and "alibi" not in ctx.needs else bias


def slopes(draw: Draw, heads: int) -> Tensor | None:
    """ALiBi slopes where the call has them."""
    if "alibi" not in draw.ctx.needs:
        return None
    found = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], device=draw.device)
    return found.requires_grad_() if "mask_grad" in draw.ctx.needs else found


# -- pages -----------------------------------------------------------------------------------------
def paged_batch(draw: Draw) -> PagedBatch:
    """Page tables whose pages are spread over the cache, and lengths that fit the context."""
    batch, tokens, page = draw.size("batch"), draw.size("tokens"), max(1, draw.size("page_size"))
    longest, blocks = draw.size("seq_len_k"), max(1, draw.size("num_blocks"))
    columns = max(1, -(-longest // page))
    index = draw.index("int32")
    count = batch * columns
    if draw.device.type == "meta":
        table = torch.empty(batch, columns, dtype=index, device="meta")
    else:
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))
        pages = order.repeat(-(-count // blocks))[:count] if count else order[:0]
        table = pages.reshape(batch, columns).to(dtype=index, device=draw.device)
    queries: list[int] | None = None
    if "paged_prefill" in draw.ctx.needs:
        most = min(draw.size("seq_len_q"), longest, tokens)
        queries = spread(tokens, batch, most)
        longest = max(longest, max(queries, default=0))
    lengths = [longest] * batch
    if queries is None:
        return make_paged_batch(table, _told(draw, lengths), None, lengths)
    return make_paged_batch(table, _told(draw, lengths), _told(draw, queries), (lengths, queries))


def _told(draw: Draw, values: Any) -> Tensor:
    return torch.tensor(values, dtype=draw.index("int32"), device="cpu").to(draw.device)


def spread(total: int, count: int, longest: int) -> list[int]:
    """`count` lengths that add up to `total`, the first the longest; none longer than `longest` where that can be."""
    if count == 0:
        return []
    longest = max(longest, -(-total // count))
    found = [min(longest, total)]
    rest = total - found[0]
    for left in range(count - 1, 0, -1):
        found.append(-(-rest // left))
        rest -= found[-1]
    return found


def paged(draw: Draw) -> Args:
    """Attention over pages that are spread over the cache."""
    ctx, needs = draw.ctx, draw.ctx.needs
    heads, kv_heads, dim = draw.size("num_heads"), draw.size("num_kv_heads"), draw.size("head_dim")
    page, blocks, width = (
        draw.size("page_size"),
        draw.size("num_blocks"),
        draw.size("head_dim_v", draw.size("head_dim")),
    )
    layout = ctx.kv_cache_layout or Layout.NHD
    inner = (page, kv_heads) if layout is Layout.NHD else (kv_heads, page)
    dtype = getattr(torch, ctx.kv_cache_dtype or ctx.dtype)
    query = draw.main(draw.size("tokens"), heads, dim, odd=False)
    caches = [_cache(draw, (blocks, *inner, size), dtype) for size in (dim, width)]
    return (
        query, *caches, paged_batch(draw), ctx.scale, ctx.window, _softcap(draw),
        slopes(draw, heads), "lse" in needs, layout.value,
    )  # fmt: skip


def _cache(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return draw.leaf(lay(draw.normal(*shape, dtype=dtype), draw.ctx.strides, axis=1))


def latent(draw: Draw) -> Args:
    """Latent attention over pages."""
    ctx = draw.ctx
    tokens, heads = draw.size("tokens"), draw.size("num_heads")
    wide, narrow = draw.size("head_dim_ckv"), draw.size("head_dim_kpe")
    page, blocks = draw.size("page_size"), draw.size("num_blocks")
    dtype = getattr(torch, ctx.kv_cache_dtype or ctx.dtype)
    queries = draw.main(tokens, heads, wide, odd=False), draw.main(tokens, heads, narrow, place=1, odd=False)
    caches = [_cache(draw, (blocks, page, size), dtype) for size in (wide, narrow)]
    scale = ctx.scale if ctx.scale is not None else (wide + narrow) ** -0.5
    return (*queries, *caches, paged_batch(draw), scale, "lse" in ctx.needs)


# -- packed ----------------------------------------------------------------------------------------
def varlen(draw: Draw) -> Args:
    """Attention over packed sequences."""
    ctx, needs = draw.ctx, draw.ctx.needs
    heads, kv_heads, dim = draw.size("num_heads"), draw.size("num_kv_heads"), draw.size("head_dim")
    batch, tokens, tokens_k = draw.size("batch"), draw.size("tokens"), draw.size("tokens_k")
    longest_q, longest_k = draw.size("seq_len_q"), draw.size("seq_len_k")
    if ctx.seq_relation == "equal":
        tokens_k, longest_k = tokens, longest_q
    lengths_q, lengths_k = spread(tokens, batch, longest_q), spread(tokens_k, batch, longest_k)
    if ctx.seq_relation != "equal":
        lengths_k = _unlike(lengths_k[::-1], lengths_q)
    offsets_q = _told(draw, [0, *accumulate(lengths_q)])
    offsets_k = offsets_q if ctx.seq_relation == "equal" else _told(draw, [0, *accumulate(lengths_k)])
    shapes = [(tokens, heads, dim), (tokens_k, kv_heads, dim), (tokens_k, kv_heads, draw.size("head_dim_v", dim))]
    query, key, value = (draw.main(*shape, place=place, axis=1) for place, shape in enumerate(shapes))
    return (
        query, key, value, offsets_q, offsets_k, max(longest_q, max(lengths_q, default=0)),
        max(longest_k, max(lengths_k, default=0)), _CAUSAL[ctx.causal], ctx.scale, ctx.window,
        _softcap(draw), slopes(draw, heads), "lse" in needs,
    )  # fmt: skip


def _unlike(lengths: list[int], others: list[int]) -> list[int]:
    """Lengths that are not the very same as others: one token moves where they are."""
    if lengths != others or len(lengths) < 2:
        return lengths
    most = max(range(len(lengths)), key=lambda place: lengths[place])
    found = list(lengths)
    if found[most]:
        found[most] -= 1
        found[most - 1] += 1
    return found


def grouped(draw: Draw) -> Args:
    """Every group of a sequence attends a longer prefix than the one before; the last attends all of it."""
    ctx = draw.ctx
    batch, groups = draw.size("batch"), draw.size("num_groups")
    heads, kv_heads, dim = draw.size("num_heads"), draw.size("num_kv_heads"), draw.size("head_dim")
    rows, cols = draw.size("seq_len_q"), draw.size("seq_len_k")
    offsets_q = [rows * place for place in range(groups * batch + 1)]
    offsets_k = [cols * place for place in range(batch + 1)]
    lengths = [[cols * (group + 1) // groups] * batch for group in range(groups)]
    host = offsets_q, offsets_k, lengths
    ends_q, ends_k, prefixes = (_told(draw, values) for values in host)
    plan = make_grouped_batch(ends_q, ends_k, prefixes.reshape(groups, batch), host)
    total_q, total_k = offsets_q[-1], offsets_k[-1]
    shapes = [(total_q, heads, dim), (total_k, kv_heads, dim), (total_k, kv_heads, draw.size("head_dim_v", dim))]
    query, key, value = (draw.main(*shape, place=place, axis=1) for place, shape in enumerate(shapes))
    return (query, key, value, plan, ctx.causal is not Causal.NONE, ctx.scale, "lse" in ctx.needs)
