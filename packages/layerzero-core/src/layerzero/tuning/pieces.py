"""Which part of a result is held against the truth, where all of it would cost too much.

The truth is the reference in float64, which for long attention means a matrix of scores nobody can hold. A piece is a
smaller call whose result is exactly a part of the large one's: some rows of some heads, some sequences of a batch, some
rows of a matrix. The kernel itself always runs on the whole, real call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerzero.model.context import Context
from layerzero.model.enums import Causal, Layout
from layerzero.model.kv_cache import PagedBatch, pages_in_use
from layerzero.model.masks import MASK_VALUES, BlockMask, ChunkMask
from layerzero.model.op import Op
from layerzero.tuning.inputs import op_named

Outputs = list[Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A smaller call of an op, and how to find its result in the result of the whole one."""

    op: str
    args: tuple[Any, ...]
    take: Callable[[Outputs], Outputs]


def pieces(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    """Calls that together stand for the whole; `room` is how many numbers the largest intermediate may have."""
    maker, op = _MAKERS.get(ctx.op), op_named(ctx.op)
    if maker is None and isinstance(op, Op) and op.row_wise:
        maker = _rows(op.row_wise)
    if maker is None:
        yield Piece(ctx.op, args, lambda outputs: outputs)
    else:
        yield from maker(ctx, args, room)


# -- attention ---------------------------------------------------------------------------------------
def _attention(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    """Rows from the beginning and the end, of the first and the last batch entry and KV head."""
    query, key, value = (_heads_first(item, ctx) for item in args[:3])
    mask, causal, window, slopes = args[3], args[5], args[7], args[9]
    batch, heads, rows, _ = query.shape
    kv_heads, cols = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    whole = batch * heads * rows * cols <= room
    batches = range(batch) if whole else _ends(batch)
    kv_chosen = range(kv_heads) if whole else _ends(kv_heads)
    chosen = [h * groups + g for h in kv_chosen for g in range(groups)]
    count = rows if whole else max(1, min(64, room // max(1, len(batches) * len(chosen) * cols)))
    # Which rows may be cut out, and which keys they then see, depends on where positions count from: here from the
    # last one, without a triangle that would say the same.
    fixed = not causal and (window is not None or slopes is not None or isinstance(mask, ChunkMask))
    for first, last in _blocks(ctx, rows, cols, count, fixed=fixed):
        keys, aligned = _visible(rows, cols, last, causal, whole)
        if keys <= 0:
            continue
        at = torch.as_tensor(list(batches)), torch.as_tensor(chosen), torch.as_tensor(list(kv_chosen))
        q = _picked(query, at[0], at[1])[:, :, first:last]
        k, v = (_picked(item, at[0], at[2])[:, :, :keys] for item in (key, value))
        part = _mask_part(mask, ctx, (rows, cols), (first, last), keys, at[0], at[1])
        own = slopes
        if slopes is not None:
            own = slopes if slopes.ndim == 1 else slopes[at[0].to(slopes.device)]
            own = own[..., at[1].to(slopes.device)]
        sinks = [None if item is None else item[at[1].to(item.device)] for item in args[11:]]
        sub = (q, k, v, part, 0.0, aligned, args[6], window, args[8], own, args[10], *sinks)

        def take(outputs: Outputs, first: int = first, last: int = last, at: Any = at) -> Outputs:
            found = [_picked(_heads_first(outputs[0], ctx), at[0], at[1])[:, :, first:last]]
            return [*found, *(_picked(item, at[0], at[1])[:, :, first:last] for item in outputs[1:])]

        yield Piece("attention", sub, take)


def _heads_first(tensor: Tensor, ctx: Context) -> Tensor:
    if tensor.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor.transpose(1, 2) if ctx.layout is Layout.BSHD else tensor


def _ends(count: int) -> list[int]:
    return sorted({0, count - 1}) if count else []


def _picked(tensor: Tensor, *places: Tensor) -> Tensor:
    for axis, place in enumerate(places):
        if len(place) != tensor.shape[axis]:
            tensor = tensor.index_select(axis, place.to(tensor.device))
    return tensor


def _blocks(ctx: Context, rows: int, cols: int, count: int, *, fixed: bool) -> list[tuple[int, int]]:
    if count >= rows:
        return [(0, rows)]
    # Rows beyond the last key of a top-left triangle see everything, as rows of the block before the end do.
    end = min(rows, cols) if ctx.causal is Causal.TOP_LEFT else rows
    count = min(count, end)
    if fixed:
        return [(rows - count, rows)]
    middle = max(0, end // 2 - count // 2)
    return sorted({(0, count), (middle, middle + count), (end - count, end)})


def _visible(rows: int, cols: int, last: int, causal: Any, whole: bool) -> tuple[int, Any]:
    """How many keys a block of rows sees, and how its triangle is aligned once later keys are cut off."""
    if whole or not causal:
        return cols, causal
    if causal is True and rows != cols:
        return min(last, cols), "bottom_right"
    return cols - rows + last, "bottom_right"


def _mask_part(
    mask: Any, ctx: Context, full: tuple[int, int], block: tuple[int, int], keys: int, batches: Tensor, heads: Tensor
) -> Any:
    if mask is None or isinstance(mask, ChunkMask):
        return mask
    if isinstance(mask, BlockMask):
        mask = mask.dense(*full, mask.blocks.device)
    shape = [1] * (4 - mask.ndim) + list(mask.shape)
    if ctx.rank == 3 and mask.ndim == 3:
        shape = [mask.shape[0], 1, *mask.shape[1:]]
    found = mask.reshape(shape)
    for axis, place in ((0, batches), (1, heads)):
        if found.shape[axis] > 1:
            found = found.index_select(axis, place.to(found.device))
    if found.shape[2] > 1:
        found = found[:, :, block[0] : block[1]]
    return found[..., :keys] if found.shape[3] > 1 else found


# -- packed sequences ----------------------------------------------------------------------------------
def _dense(
    ctx: Context, segment: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...], start: int, room: int
) -> Iterator[Piece]:
    """One sequence as a call of attention; `options` are attn_mask … return_lse, `start` its first query token."""
    query, key, value = (item.transpose(0, 1).unsqueeze(0) for item in segment)
    length = segment[0].shape[0]
    inner = replace(ctx, op="attention", layout=Layout.BHSD, rank=4, dims=(("head_dim", query.shape[-1]),))
    for piece in _attention(inner, (query, key, value, *options), room):

        def take(outputs: Outputs, piece: Piece = piece) -> Outputs:
            rows = [item[start : start + length] for item in outputs]
            found = [rows[0].transpose(0, 1).unsqueeze(0), *(item.transpose(0, 1).unsqueeze(0) for item in rows[1:])]
            return piece.take(found)

        yield Piece("attention", piece.args, take)


def _some(lengths: Sequence[int]) -> list[int]:
    """The first, the last and the longest that have anything to compute."""
    alive = [place for place, length in enumerate(lengths) if length]
    if not alive:
        return []
    return sorted({alive[0], alive[-1], max(alive, key=lambda place: lengths[place])})


def _varlen(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    query, key, value, cu_q, cu_k = args[:5]
    causal, scale, window, softcap, slopes, lse, *sinks = args[7:]
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    lengths = [last - first for first, last in pairwise(starts_q)]
    for row in _some(lengths):
        span_q, span_k = slice(*starts_q[row : row + 2]), slice(*starts_k[row : row + 2])
        if starts_k[row] == starts_k[row + 1]:
            continue
        own = slopes[row] if slopes is not None and slopes.ndim == 2 else slopes
        options = (None, 0.0, causal, scale, window, softcap, own, lse, *sinks)
        yield from _dense(ctx, (query[span_q], key[span_k], value[span_k]), options, starts_q[row], room)


def _grouped(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    query, key, value, batch, causal, scale, lse = args
    segments = [item for item in batch.segments() if item.kv_len]
    for place in _some([item.q_len for item in segments]):
        item = segments[place]
        span = slice(item.k_start, item.k_start + item.kv_len)
        options = (None, 0.0, "bottom_right" if causal else False, scale, None, None, None, lse)
        parts = query[item.q_start : item.q_start + item.q_len], key[span], value[span]
        yield from _dense(ctx, parts, options, item.q_start, room)


# -- pages ---------------------------------------------------------------------------------------------
def _tails(
    batch: PagedBatch, heads: int, caches: Sequence[Tensor], page: int, room: int
) -> Iterator[tuple[int, slice, list[Tensor], PagedBatch]]:
    """Some sequences of a batch, each with its last query tokens alone, where these lie among all, and its pages."""
    for row in _some(batch.query_lens_host):
        length, context = batch.query_lens_host[row], batch.context_lens_host[row]
        count = min(length, max(1, room // max(1, context * heads)))
        end = sum(batch.query_lens_host[: row + 1])
        like = batch.context_lens
        lens = like.new_tensor([context]) if like.device.type != "meta" else like[:1]
        queries = like.new_tensor([count])
        one = PagedBatch(batch.block_tables[row : row + 1], lens, queries, (context,), (count,))
        pages, own = pages_in_use(one, page)
        yield row, slice(end - count, end), [torch.index_select(item, 0, pages) for item in caches], own


def _paged(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    query, keys, values, batch, scale, window, softcap, slopes, lse, layout, *others = args
    page = keys.shape[1 if layout == "NHD" else 2]
    for row, span, caches, own in _tails(batch, query.shape[1], (keys, values), page, room):
        bias = slopes[row : row + 1] if slopes is not None and slopes.ndim == 2 else slopes
        sub = (query[span], *caches, own, scale, window, softcap, bias, lse, layout, *others)
        yield Piece("paged_attention", sub, _tokens(span))


def _latent(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
    wide, narrow, ckv, kpe, batch, scale, lse = args
    for _, span, caches, own in _tails(batch, wide.shape[1], (ckv, kpe), ckv.shape[1], room):
        yield Piece(ctx.op, (wide[span], narrow[span], *caches, own, scale, lse), _tokens(span))


def _tokens(span: slice) -> Callable[[Outputs], Outputs]:
    return lambda outputs: [item[span] for item in outputs]


# -- rows ----------------------------------------------------------------------------------------------
def _rows(places: tuple[int, ...]) -> Callable[..., Iterator[Piece]]:
    """Some rows of the arguments at `places`, where each row of the result depends on its own rows alone."""

    def make(ctx: Context, args: tuple[Any, ...], room: int) -> Iterator[Piece]:
        count = args[places[0]].numel() // max(1, args[places[0]].shape[-1])
        beside = [
            max(t.shape) for place, t in enumerate(args) if isinstance(t, Tensor) and t.ndim > 1 and place not in places
        ]
        most = max(16, room // max(1, 4 * int(args[places[0]].shape[-1]), *beside))
        if count <= most:
            yield Piece(ctx.op, args, lambda outputs: outputs)
            return
        third = max(1, most // 3)
        at = torch.cat([torch.arange(start, start + third) for start in (0, (count - third) // 2, count - third)])

        def cut(item: Any) -> Any:
            flat = item.reshape(-1, item.shape[-1])
            return flat.index_select(0, at.to(flat.device))

        sub = tuple(cut(item) if place in places and item is not None else item for place, item in enumerate(args))
        yield Piece(ctx.op, sub, lambda outputs: [cut(item) for item in outputs])

    return make


assert MASK_VALUES == (BlockMask, ChunkMask)  # both are cut above
_MAKERS: dict[str, Callable[[Context, tuple[Any, ...], int], Iterator[Piece]]] = {
    "attention": _attention,
    "varlen_attention": _varlen,
    "grouped_attention": _grouped,
    "paged_attention": _paged,
    "mla_paged_attention": _latent,
}
