"""Products of codes with codes, FP8 or INT8: device code. Rows of activations are encoded, then multiplied.

The sums of codes are taken by the matrix units; what they stand for is the sum times the scale of the row and that of
the weight's channel, or with a scale for each block of the inner axis, the sum of the blocks' sums so scaled.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import _gate


@triton.jit(do_not_specialize=["width", "x_step", "largest"])
def encode(
    x, codes, scales, width: tl.int32, x_step: tl.int64, largest: tl.float32, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """A row in codes, its largest magnitude the largest code; one row a program, ties to even."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    value = tl.load(x + row * x_step + lane, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), 0)
    scale = tl.where(peak == 0.0, 1.0, tl.maximum(tl.div_rn(peak, largest), 1.1754943508222875e-38))
    scale = tl.where(tl.max((value != value).to(tl.int32), 0) > 0, float("nan"), scale)  # a NaN stays visible
    near = tl.div_rn(value, scale)
    if WHOLE:
        near = tl.where(near == near, near, 0.0) + 12582912.0  # where a float's last bit is a whole
        code = (near - 12582912.0).to(tl.int8)
    else:
        code = tl.clamp(near, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(codes.dtype.element_ty)
    tl.store(codes + row * width + lane, code, mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["m", "n", "k", "w_n", "s_n", "s_b"])
def product(
    x, codes, rows_scale, scale, bias, out,
    m: tl.int32, n: tl.int32, k: tl.int32, w_n: tl.int64, s_n: tl.int64, s_b: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UNIT: tl.constexpr,
    PER: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes x [m, k] times codes [n, k]; with PER > 0 a scale of the weight for each PER steps of BLOCK_K, else one."""
    w_n, k = w_n * UNIT, k * UNIT
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP  # tiles that share columns of the weight run next to each other
    high = tl.minimum(tiles_m - first, GROUP)
    rows = (first + tile % (GROUP * tiles_n) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % (GROUP * tiles_n) // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    good_m, good_n = rows < m, columns < n
    inner = tl.arange(0, BLOCK_K)
    left = x + tl.where(good_m, rows, 0).to(tl.int64)[:, None] * k + inner[None, :]
    right = codes + tl.where(good_n, columns, 0).to(tl.int64)[None, :] * w_n + inner[:, None]
    scales = scale + tl.where(good_n, columns, 0) * s_n
    if WHOLE and PER == 0:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(0, tl.cdiv(k, BLOCK_K)):
        if EVEN_K:
            given = tl.load(left)
            held = tl.load(right)
        else:
            inside = step * BLOCK_K + inner < k
            given = tl.load(left, mask=inside[None, :], other=0.0)
            held = tl.load(right, mask=inside[:, None], other=0.0)
        if PER > 0:
            here = tl.load(scales + (step // PER) * s_b)
            if WHOLE:
                part = tl.dot(given, held, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(given, held)
            acc += part * here[None, :]
        elif WHOLE:
            acc = tl.dot(given, held, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(given, held, acc, max_num_imprecise_acc=BLOCK_K)
        left += BLOCK_K
        right += BLOCK_K
    total = acc.to(tl.float32) * tl.load(rows_scale + rows, mask=good_m, other=0.0)[:, None]
    if PER == 0:
        total *= tl.load(scales)[None, :]
    if BIAS:
        total += tl.load(bias + columns, mask=good_n, other=0.0).to(tl.float32)[None, :]
    if KIND != "none":
        total = _gate(total, KIND)
    place = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=good_m[:, None] & good_n[None, :])
