"""Mixture of experts: device code.

The slots (token * top_k + place) are put in order by expert, and each expert's run of slots is cut into tiles of rows.
A product then takes a tile of rows and a tile of its expert's weight. The first product reads the tokens' rows where
they lie and writes what the gate gives, in order; the second reads that and writes each slot's row where the slot is,
so that adding up a token's slots reads neighbours. Slots of no expert here are in no tile.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import _gate
from layerzero_triton.kernels.dequant import scaled_halves


@triton.jit
def _experts_of(ids, places, slots, experts, offset):
    """The expert of each slot, counted from the first one here; -1 for those that are of none."""
    named = tl.load(ids + places, mask=places < slots, other=-1).to(tl.int64) - offset
    return tl.where((places < slots) & (named >= 0) & (named < experts), named, -1).to(tl.int32)


@triton.jit
def _tabulate(total, starts, ends, tiles, experts, BLOCK_M: tl.constexpr, BINS: tl.constexpr):
    """From the number of slots of each expert: where its run starts and ends; the expert and first row of each tile.

    `tiles` holds how many there are, then two numbers a tile.
    """
    lane = tl.arange(0, BINS)
    stop = tl.cumsum(total, 0)
    start = stop - total
    tl.store(starts + lane, start, mask=lane < experts)
    tl.store(ends + lane, stop, mask=lane < experts)
    many = tl.cdiv(total, BLOCK_M)
    last = tl.cumsum(many, 0)
    tl.store(tiles, tl.sum(many, 0))
    table = tiles + 2 + 2 * (last - many)
    for step in range(0, tl.max(many, 0)):
        tl.store(table + 2 * step, lane, mask=step < many)
        tl.store(table + 2 * step + 1, start + step * BLOCK_M, mask=step < many)


@triton.jit(do_not_specialize=["slots", "experts", "offset"])
def route(
    ids, order, starts, ends, tiles, slots: tl.int32, experts: tl.int32, offset: tl.int64, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The order of a few slots, by one program: a slot comes after those of lower experts, and its own before it."""
    places = tl.arange(0, SLOTS)
    mine = _experts_of(ids, places, slots, experts, offset)
    total = tl.histogram(tl.where(mine < 0, 0, mine), BINS, mask=mine >= 0)
    _tabulate(total, starts, ends, tiles, experts, BLOCK_M, BINS)
    before = (mine[None, :] < mine[:, None]) | ((mine[None, :] == mine[:, None]) & (places[None, :] < places[:, None]))
    position = tl.sum((before & (mine >= 0)[None, :]).to(tl.int32), axis=1)
    tl.store(order + position, places, mask=mine >= 0)


@triton.jit(do_not_specialize=["slots", "experts", "offset"])
def count(
    ids, counts, slots: tl.int32, experts: tl.int32, offset: tl.int64, SLOTS: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """How many of SLOTS slots each expert has; one chunk of them a program."""
    places = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    mine = _experts_of(ids, places, slots, experts, offset)
    total = tl.histogram(tl.where(mine < 0, 0, mine), BINS, mask=mine >= 0)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["chunks", "experts"])
def tabulate(
    counts, starts, ends, tiles, chunks: tl.int32, experts: tl.int32, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Counts become how many slots of the expert stand in the chunks before; then the tables. One program."""
    lane = tl.arange(0, BINS)
    total = tl.zeros([BINS], dtype=tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        at = counts + chunk[:, None] * BINS + lane[None, :]
        each = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        tl.store(at, tl.cumsum(each, 0) - each + total[None, :], mask=(chunk < chunks)[:, None])
        total += tl.sum(each, 0)
    _tabulate(total, starts, ends, tiles, experts, BLOCK_M, BINS)


@triton.jit(do_not_specialize=["slots", "experts", "offset"])
def arrange(
    ids, order, starts, counts, slots: tl.int32, experts: tl.int32, offset: tl.int64, SLOTS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """The order of the slots of one chunk."""
    lane = tl.arange(0, SLOTS)
    places = tl.program_id(0) * SLOTS + lane
    mine = _experts_of(ids, places, slots, experts, offset)
    equal = (mine[None, :] == mine[:, None]) & (lane[None, :] < lane[:, None])
    here = mine >= 0
    expert = tl.where(here, mine, 0)
    position = tl.load(starts + expert) + tl.load(counts + tl.program_id(0) * BINS + expert)
    tl.store(order + position + tl.sum(equal.to(tl.int32), axis=1), places, mask=here)


_NUMBERS = ["n", "k", "x_m", "w_e", "w_n", "w_k", "top_k", "alpha", "limit"]


@triton.jit(do_not_specialize=_NUMBERS)
def product(
    x, weights, scale, bias, order, ends, tiles, out,
    n: tl.int32, k: tl.int32, x_m: tl.int64, w_e: tl.int64, w_n: tl.int64, w_k: tl.int64, top_k: tl.int32,
    alpha: tl.float32, limit: tl.float32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    UNIT: tl.constexpr, N_UNIT: tl.constexpr, ALONG_K: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    GATE: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, CODES: tl.constexpr, PER: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A tile of rows times a tile of their expert's weight, [n, k] by its steps; program (tile, columns), columns next.

    FIRST: row r is that of token order[r] // top_k of x, and the result is row r of out, through the activation. With
    GATE ("halves" or "turns", how gate and up lie among the rows of the weight) every second column of the tile is the
    up of the gate before it, and out is half as wide. Else row r of x gives row order[r] of out, nothing applied.
    ALONG_K: the weight's rows are contiguous; else its columns are. CODES: "bytes" with a scale for each PER of a row,
    0 for one a row, or "e2m1", two to a byte.
    """
    w_e, x_m, k, n = w_e * UNIT, x_m * UNIT, k * UNIT, n * N_UNIT
    if ALONG_K:
        w_n, w_k = w_n * UNIT, 1
    else:
        w_n, w_k = 1, w_k * UNIT
    wide = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) // wide
    if tile < tl.load(tiles):
        expert = tl.load(tiles + 2 + 2 * tile).to(tl.int64)
        first = tl.load(tiles + 3 + 2 * tile)
        rows = first + tl.arange(0, BLOCK_M)
        good_m = rows < tl.load(ends + expert)
        slot = tl.load(order + rows, mask=good_m, other=0)
        columns = (tl.program_id(0) % wide) * BLOCK_N + tl.arange(0, BLOCK_N)
        good_n = columns < n
        if GATE == "halves":
            which = columns // 2 + (columns % 2) * (n // 2)
        else:
            which = columns
        if not EVEN_N:
            which = tl.where(good_n, which, 0)
        if FIRST:
            source = slot // top_k
        else:
            source = tl.where(good_m, rows, first)
        inner = tl.arange(0, BLOCK_K)
        left = x + source.to(tl.int64)[:, None] * x_m + inner[None, :]
        PACK: tl.constexpr = 2 if CODES == "e2m1" else 1  # columns of the weight in an element
        along = tl.arange(0, BLOCK_K // PACK)
        right = weights + expert * w_e + which.to(tl.int64)[None, :] * w_n + along[:, None] * w_k
        if CODES != "none":
            scales = scale + (expert * n + which) * (k // PER if PER else 1)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for step in range(0, tl.cdiv(k, BLOCK_K)):
            if EVEN_K:
                given = tl.load(left)
                held = tl.load(right)
            else:
                given = tl.load(left, mask=(step * BLOCK_K + inner < k)[None, :], other=0.0)
                held = tl.load(right, mask=(step * BLOCK_K + along * PACK < k)[:, None], other=0.0)
            if CODES == "e2m1":
                even, odd = tl.split(tl.reshape(given, [BLOCK_M, BLOCK_K // 2, 2]))
                evens, odds = scaled_halves(held, scales, step, k, x.dtype.element_ty, ASM)
                acc = tl.dot(odd, odds, tl.dot(even, evens, acc))
            elif PER:
                factor = tl.load(scales + step * BLOCK_K // PER)
                acc += tl.dot(given, held.to(given.dtype)) * factor[None, :]
            else:
                acc = tl.dot(given, held.to(given.dtype), acc, input_precision="ieee")
            left += BLOCK_K
            right += BLOCK_K // PACK * w_k
        if CODES == "bytes" and PER == 0:
            acc *= tl.load(scales)[None, :]
        if BIAS:
            acc += tl.load(bias + expert * n + which).to(tl.float32)[None, :]
        if not FIRST:
            place = out + slot.to(tl.int64)[:, None] * n + columns[None, :]
            tl.store(place, acc.to(out.dtype.element_ty), mask=good_m[:, None] & good_n[None, :])
        elif GATE == "none":
            place = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
            tl.store(place, _gate(acc, KIND).to(out.dtype.element_ty), mask=good_m[:, None] & good_n[None, :])
        else:
            gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
            if LIMIT:
                gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
                up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
            if KIND == "swigluoai":
                result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
            else:
                result = _gate(gate, KIND) * up
            column = (tl.program_id(0) % wide) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            place = out + rows.to(tl.int64)[:, None] * (n // 2) + column[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=good_m[:, None] & (column < n // 2)[None, :])


@triton.jit(do_not_specialize=["width", "experts", "offset"])
def combine(
    results, ids, shares, out, width: tl.int32, experts: tl.int32, offset: tl.int64, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The weighted sum over a token's slots; program (token, columns)."""
    token, width = tl.program_id(0).to(tl.int64), width * UNIT
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        slot = token * TOP_K + place
        named = tl.load(ids + slot).to(tl.int64) - offset
        if (named >= 0) & (named < experts):
            row = tl.load(results + slot * width + columns, mask=inside, other=0.0).to(tl.float32)
            total += row * tl.load(shares + slot).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
