"""Product with an INT8 or FP8 weight: device code.

Codes are exact in 16 bits, so they are multiplied as they are and the sums, in float32, are scaled afterwards: once
for a scale a tensor or channel, once a block of the inner axis for a scale a block. A zero point is taken out of the
sums: (code - zero) * x adds up to code * x minus zero times the sum of x.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import _gate

_NUMBERS = ["m", "n", "k", "x_m", "w_n", "s_n", "s_b", "each"]


@triton.jit(do_not_specialize=_NUMBERS)
def product(
    x, codes, scale, zero, bias, out,
    m: tl.int32, n: tl.int32, k: tl.int32, x_m: tl.int64, w_n: tl.int64, s_n: tl.int64, s_b: tl.int64, each: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x [m, k] times codes [n, k]; program (tile, split of the inner axis).

    With one split `out` is the result, [m, n] contiguous; else float32 [splits, m, n], scaled, for `finish`. A split is
    `each` steps of BLOCK_K long. With BLOCKS there is a scale for each PER steps of the inner axis.
    """
    x_m, w_n, k = x_m * UNIT, w_n * UNIT, k * UNIT
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = tile // (GROUP * tiles_n)  # tiles that share columns of the weight run next to each other
    first = band * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    rows = (first + tile % (GROUP * tiles_n) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % (GROUP * tiles_n) // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    good_m, good_n = rows < m, columns < n
    piece = tl.program_id(1)
    inner = tl.arange(0, BLOCK_K)
    left = x + tl.where(good_m, rows, 0).to(tl.int64)[:, None] * x_m
    right = codes + tl.where(good_n, columns, 0).to(tl.int64)[None, :] * w_n
    scales = scale + tl.where(good_n, columns, 0) * s_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    last = tl.minimum((piece + 1) * each, tl.cdiv(k, BLOCK_K))
    for step in range(piece * each, last):
        at = step * BLOCK_K + inner
        if EVEN_K:
            given = tl.load(left + at[None, :])
            weights = tl.load(right + at[:, None])
        else:
            given = tl.load(left + at[None, :], mask=(at < k)[None, :], other=0.0)
            weights = tl.load(right + at[:, None], mask=(at < k)[:, None], other=0.0)
        if BLOCKS:
            here = tl.load(scales + (step // PER) * s_b).to(tl.float32)
            part = tl.dot(given, weights.to(given.dtype))
            if ZERO:
                point = tl.load(zero + tl.where(good_n, columns, 0) * s_n + (step // PER) * s_b).to(tl.float32)
                part -= tl.sum(given.to(tl.float32), axis=1)[:, None] * point[None, :]
            acc += part * here[None, :]
        else:
            acc = tl.dot(given, weights.to(given.dtype), acc)
            if ZERO:
                sums += tl.sum(given.to(tl.float32), axis=1)
    if not BLOCKS:
        if ZERO:
            point = tl.load(zero + tl.where(good_n, columns, 0) * s_n).to(tl.float32)
            acc -= sums[:, None] * point[None, :]
        acc *= tl.load(scales).to(tl.float32)[None, :]
    mask = good_m[:, None] & good_n[None, :]
    place = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if not SPLIT:
        if BIAS:
            acc += tl.load(bias + columns, mask=good_n, other=0.0).to(tl.float32)[None, :]
        if KIND != "none":
            acc = _gate(acc, KIND)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + piece.to(tl.int64) * m * n + place, acc, mask=mask)


@triton.jit(do_not_specialize=["m", "n", "splits"])
def finish(
    parts, bias, out, m: tl.int32, n: tl.int32, splits: tl.int32, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Add the splits in order, then bias and activation."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for piece in range(0, splits):
        acc += tl.load(parts + (piece * m + row) * n + columns, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND != "none":
        acc = _gate(acc, KIND)
    tl.store(out + row * n + columns, acc.to(out.dtype.element_ty), mask=inside)
