"""Calls of the attention family from their contexts: dense, paged, packed, grouped and latent."""

from __future__ import annotations

import math
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import PagedBatch, make_paged_batch
from layerzero.model.masks import block_mask, chunk_mask
from layerzero.tuning.inputs import Draw, lay

Args = tuple[Any, ...]

SOFTCAP = 30.0
_CAUSAL = {Causal.NONE: False, Causal.TOP_LEFT: True, Causal.BOTTOM_RIGHT: "bottom_right"}


def attention(draw: Draw) -> Args:
    """Dense attention, with masks of every kind."""
    ctx, needs = draw.ctx, draw.ctx.needs
    batch, (heads, kv_heads, dim) = draw.size("batch"), _heads(draw)
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
        _softcap(draw), slopes(draw), "lse" in needs, *sinks(draw),
    )  # fmt: skip


def _heads(draw: Draw) -> tuple[int, int, int]:
    """Heads of the queries, heads of the keys (as many unless told), and their width."""
    heads = draw.size("num_heads")
    return heads, draw.size("num_kv_heads", heads), draw.size("head_dim")


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
    batch, heads = draw.size("batch"), draw.size("num_heads")
    lead = {"": (), "all": (1, 1), "batch": (batch, 1), "heads": (batch, heads)}[draw.choice("mask_for", "")]
    if "block_mask" in ctx.needs:
        pair = sizes["mask_block_q"], sizes["mask_block_k"]
        return block_mask(_attended(draw, 0.6, *lead, -(-rows // pair[0]), -(-cols // pair[1])), pair)
    if "chunk_mask" in ctx.needs:
        return chunk_mask(sizes["mask_chunk"])
    if ctx.mask is MaskKind.NONE:
        return None
    if ctx.mask is MaskKind.BOOL:
        found = _attended(draw, 0.75, *lead, rows, cols)
        if draw.choice("dead_row"):
            found[..., min(1, rows - 1), :] = False
        return found
    bias = draw.normal(*lead, rows, cols, dtype=draw.dtype())
    if draw.choice("masked"):
        bias = bias.masked_fill(~_attended(draw, 0.75, *lead, rows, cols), -torch.inf)
    return bias.requires_grad_() if "mask_grad" in ctx.needs and "alibi" not in ctx.needs else bias


def _attended(draw: Draw, share: float, *shape: int) -> Tensor:
    """True with some probability; the first key always."""
    found = draw.uniform(*shape) < share
    if found.device.type != "meta":
        found[..., 0] = True
    return found


def slopes(draw: Draw) -> Tensor | None:
    """ALiBi slopes where the call has them."""
    if "alibi" not in draw.ctx.needs:
        return None
    heads = draw.size("num_heads")
    found = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], device=draw.device)
    if draw.choice("slopes_for") == "batch":
        found = found * torch.linspace(1.0, 0.5, len(draw.choice("contexts")), device=draw.device)[:, None]
    return found.requires_grad_() if "mask_grad" in draw.ctx.needs else found


def sinks(draw: Draw) -> Args:
    """Sinks, from far below the scores to far above, where the call has them."""
    if "sinks" not in draw.ctx.needs:
        return ()
    found = torch.linspace(-2.0, 4.0, draw.size("num_heads"), device=draw.device)
    return (found.requires_grad_() if "sinks_grad" in draw.ctx.needs else found,)


# -- pages -----------------------------------------------------------------------------------------
def paged_batch(draw: Draw) -> tuple[PagedBatch, int, int]:
    """Page tables whose pages are spread over the cache, and lengths that fit the context; how many tokens and pages.

    Lengths that are chosen (`contexts`, `queries`) come first, the sizes of the context else.
    """
    lengths, queries = draw.choice("contexts"), draw.choice("queries")
    page, longest = max(1, draw.size("page_size")), max(lengths) if lengths else draw.size("seq_len_k")
    batch, columns = len(lengths) if lengths else draw.size("batch"), max(1, -(-longest // page))
    several = "paged_prefill" in draw.ctx.needs  # else a token a sequence, also where sizes were made smaller
    tokens = sum(queries) if queries else draw.size("tokens", batch) if several else batch
    blocks = max(1, draw.size("num_blocks", batch * columns + 1))
    index = draw.index("int32")
    count = batch * columns
    if draw.device.type == "meta":
        table = torch.empty(batch, columns, dtype=index, device="meta")
    else:
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))
        pages = order.repeat(-(-count // blocks))[:count] if count else order[:0]
        table = pages.reshape(batch, columns).to(dtype=index, device=draw.device)
    if several and queries is None:
        most = min(draw.size("seq_len_q"), longest, tokens)
        queries = spread(tokens, batch, most)
        longest = max(longest, max(queries, default=0))
    lengths = list(lengths or [longest] * batch)
    if queries is None:
        return make_paged_batch(table, _told(draw, lengths), None, lengths), tokens, blocks
    cross = draw.ctx.causal is Causal.NONE
    host = lengths, list(queries)
    made = make_paged_batch(table, _told(draw, lengths), _told(draw, queries), host, cross=cross)
    return made, tokens, blocks


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
    heads, kv_heads, dim = _heads(draw)
    page, width = draw.size("page_size"), draw.size("head_dim_v", dim)
    batch, tokens, blocks = paged_batch(draw)
    layout = ctx.kv_cache_layout or Layout.NHD
    inner = (page, kv_heads) if layout is Layout.NHD else (kv_heads, page)
    dtype = getattr(torch, ctx.kv_cache_dtype or ctx.dtype)
    query = draw.main(tokens, heads, dim, odd=False)
    caches = [_cache(draw, (blocks, *inner, size), dtype) for size in (dim, width)]
    last: Args = sinks(draw)
    if needs & {"kv_scales", "non_causal"}:
        last = (*(last or (None,)), "non_causal" not in needs)
    if "kv_scales" in needs:
        count = kv_heads if draw.choice("scales_for", "") == "heads" else 1
        last = (*last, *(torch.linspace(at, 2 * at, count, device=draw.device) for at in (0.5, 1.5)))
    return (
        query, *caches, batch, ctx.scale, ctx.window, _softcap(draw),
        slopes(draw), "lse" in needs, layout.value, *last,
    )  # fmt: skip


def _cache(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return draw.leaf(lay(draw.normal(*shape, dtype=dtype), draw.ctx.strides, axis=1))


def latent(draw: Draw) -> Args:
    """Latent attention over pages."""
    ctx = draw.ctx
    heads, page = draw.size("num_heads"), draw.size("page_size")
    wide, narrow = draw.size("head_dim_ckv"), draw.size("head_dim_kpe")
    batch, tokens, blocks = paged_batch(draw)
    dtype = getattr(torch, ctx.kv_cache_dtype or ctx.dtype)
    queries = draw.main(tokens, heads, wide, odd=False), draw.main(tokens, heads, narrow, place=1, odd=False)
    caches = [_cache(draw, (blocks, page, size), dtype) for size in (wide, narrow)]
    scale = ctx.scale if ctx.scale is not None else (wide + narrow) ** -0.5
    return (*queries, *caches, batch, scale, "lse" in ctx.needs)


# -- packed ----------------------------------------------------------------------------------------
def varlen(draw: Draw) -> Args:
    """Attention over packed sequences."""
    ctx, needs = draw.ctx, draw.ctx.needs
    batch, longest_q, longest_k = draw.size("batch"), draw.size("seq_len_q", 0), draw.size("seq_len_k", 0)
    lengths_q = list(draw.choice("queries") or spread(draw.size("tokens"), batch, longest_q))
    offsets_q = offsets_k = _told(draw, [0, *accumulate(lengths_q)])
    lengths_k = lengths_q
    if draw.choice("keys") is not None or ctx.seq_relation != "equal":
        chosen = draw.choice("keys")
        lengths_k = list(chosen or _unlike(spread(draw.size("tokens_k"), batch, longest_k)[::-1], lengths_q))
        offsets_k = _told(draw, [0, *accumulate(lengths_k)])
    else:
        longest_k = longest_q
    return (
        *_packed(draw, sum(lengths_q), sum(lengths_k)), offsets_q, offsets_k, max(longest_q, max(lengths_q, default=0)),
        max(longest_k, max(lengths_k, default=0)), _CAUSAL[ctx.causal], ctx.scale, ctx.window,
        _softcap(draw), slopes(draw), "lse" in needs, *sinks(draw),
    )  # fmt: skip


def _packed(draw: Draw, tokens: int, tokens_k: int) -> tuple[Tensor, ...]:
    heads, kv_heads, dim = _heads(draw)
    shapes = ((tokens, heads, dim), (tokens_k, kv_heads, dim), (tokens_k, kv_heads, draw.size("head_dim_v", dim)))
    return tuple(draw.main(*shape, place=place, axis=1) for place, shape in enumerate(shapes))


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
    rows, cols, groups = draw.size("seq_len_q"), draw.size("seq_len_k"), draw.size("num_groups")
    keys = draw.choice("keys", [cols] * draw.size("batch"))
    queries = draw.choice("queries", [[rows] * len(keys)] * groups)
    prefixes = draw.choice("prefixes", [[n * (group + 1) // groups for n in keys] for group in range(groups)])
    host = [0, *accumulate(chain(*queries))], [0, *accumulate(keys)], [list(part) for part in prefixes]
    ends_q, ends_k, lengths = (_told(draw, values) for values in host)
    plan = make_grouped_batch(ends_q, ends_k, lengths.reshape(len(queries), len(keys)), host)
    tensors = _packed(draw, host[0][-1], host[1][-1])
    return (*tensors, plan, ctx.causal is not Causal.NONE, ctx.scale, "lse" in ctx.needs)
