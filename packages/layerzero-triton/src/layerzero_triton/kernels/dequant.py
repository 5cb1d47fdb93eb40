"""Product with an INT8, FP8, INT4 or MXFP4 weight: device code.

Codes are exact in 16 bits, so they are multiplied as they are and the sums, in float32, are scaled afterwards: once
for a scale a tensor or channel, once a block of the inner axis for a scale a block. A zero point is taken out of the
sums: (code - zero) * x adds up to code * x minus zero times the sum of x. An MXFP4 code times its scale, a power of
two, is exact in bfloat16 too: there the codes are scaled at once, since its blocks are short.

A byte of a four-bit format holds the codes of an even column and of the odd one after it. They are not put back in
turn: the even columns of x meet the low halves, the odd ones the high halves.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import _gate

# A register of four bytes to four low and four high codes, two to a register: bytes become halves of 16 bits, whose low
# four bits then make the number 128 + (code ^ 8) in bfloat16, from which 136 is taken.
_INT4_ASM = """
{
.reg .b32 a, b, c, d, one, off;
mov.b32 one, 0x3F803F80;
mov.b32 off, 0xC308C308;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
"""
for _place, _held in enumerate("abcd"):
    _INT4_ASM += f"lop3.b32 {_held}, {_held}, 0x000F000F, 0x43084308, 0x6A;"
    _INT4_ASM += f"fma.rn.bf16x2 ${_place}, {_held}, one, off;"
_INT4_ASM += "}"
# E2M1: sign, exponent and mantissa moved to their places in bfloat16, whose exponent is larger by 126.
_E2M1_PART = """
shl.b32 s, {0}, {1};
shl.b32 t, {0}, {2};
and.b32 t, t, 0x01C001C0;
lop3.b32 s, s, 0x80008000, t, 0xEA;
fma.rn.bf16x2 ${3}, s, up, none;
"""
_E2M1_ASM = """
{
.reg .b32 a, b, s, t, up, none;
mov.b32 up, 0x7E807E80;
mov.b32 none, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
"""
for _part in (("a", 12, 6, 0), ("b", 12, 6, 1), ("a", 8, 2, 2), ("b", 8, 2, 3)):
    _E2M1_ASM += _E2M1_PART.format(*_part)
_E2M1_ASM += "}"
# INT4 to float32: a low code in bits 16 to 19, its sign turned, makes 128 + (code ^ 8), a high one in bits 12 to 15 and
# with another exponent 2048 + (code ^ 8). Four registers have all eight where they are wanted.
_WIDE_INT4_ASM = "{ .reg .b32 a, b, c; shf.l.wrap.b32 a, $8, $8, 16; shl.b32 b, $8, 8; shr.u32 c, $8, 8;"
for _place, _held in enumerate(("a", "b", "$8", "c", "b", "$8", "c", "a")):
    _bits = "0x000F0000, 0x43080000" if _place < 4 else "0x0000F000, 0x45008000"
    _WIDE_INT4_ASM += f"lop3.b32 ${_place}, {_held}, {_bits}, 0x6A;"
# E2M1 to float32 by way of float16, two codes at a time that lie four apart: numbers 2^14 times smaller.
_WIDE_E2M1_ASM = "{ .reg .b32 s, t; .reg .b16 a, b;"
for _place, (_one, _other) in enumerate(((0, 2), (4, 6), (1, 3), (5, 7))):
    _WIDE_E2M1_ASM += f"shl.b32 s, $8, {12 - 4 * _place}; shf.l.wrap.b32 t, $8, $8, {(9 - 4 * _place) % 32};"
    _WIDE_E2M1_ASM += "and.b32 t, t, 0x0E000E00; lop3.b32 t, s, 0x80008000, t, 0xEA; mov.b32 {a, b}, t;"
    _WIDE_E2M1_ASM += f"cvt.f32.f16 ${_one}, a; cvt.f32.f16 ${_other}, b;"
INT4_ASM, E2M1_ASM = tl.constexpr(_INT4_ASM), tl.constexpr(_E2M1_ASM)
WIDE_INT4_ASM, WIDE_E2M1_ASM = tl.constexpr(_WIDE_INT4_ASM + "}"), tl.constexpr(_WIDE_E2M1_ASM + "}")


@triton.jit
def halves(codes, LIKE: tl.constexpr, FOUR: tl.constexpr, ASM: tl.constexpr):
    """The numbers of the low and of the high halves of bytes, in the dtype LIKE; FOUR is "int4" or "e2m1"."""
    if ASM and LIKE == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            INT4_ASM if FOUR == "int4" else E2M1_ASM, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = _number((codes & 0xF).to(tl.int32), FOUR).to(LIKE)
        high = _number((codes >> 4).to(tl.int32), FOUR).to(LIKE)
    return low, high


@triton.jit
def _number(code, FOUR: tl.constexpr):
    """The number of a code from 0 to 15, in float32."""
    if FOUR == "int4":
        result = ((code ^ 8) - 8).to(tl.float32)
    else:
        power = (code >> 1) & 3
        size = tl.where(power == 0, (code & 1).to(tl.float32) * 0.5, (2 + (code & 1)).to(tl.float32) * 0.5)
        size *= tl.where(power > 1, (1 << (tl.maximum(power, 1) - 1)).to(tl.float32), 1.0)
        result = tl.where(code > 7, -size, size)
    return result


@triton.jit
def power_of_two(scale, LIKE: tl.constexpr):
    """E8M0 bytes as numbers: exponents of float32, 255 the mark of no number."""
    whole = scale.to(tl.int32)
    bits = tl.where(whole == 0, 0x400000, whole << 23)  # 2^-127 is subnormal
    return tl.where(whole == 255, float("nan"), bits.to(tl.float32, bitcast=True)).to(LIKE)


@triton.jit
def scaled_halves(codes, scales, step, k, LIKE: tl.constexpr, ASM: tl.constexpr):
    """The numbers of MXFP4 bytes [half the inner axis, columns], times the powers of two at each column's place."""
    HALF: tl.constexpr = codes.shape[0]
    low, high = halves(codes, LIKE, "e2m1", ASM)
    block = step * (HALF // 16) + tl.arange(0, HALF // 16)
    power = tl.load(scales[None, :] + block[:, None], mask=(block < k // 32)[:, None], other=0)
    factor = tl.broadcast_to(power_of_two(power, LIKE)[:, None, :], [HALF // 16, 16, codes.shape[1]])
    factor = tl.reshape(factor, [HALF, codes.shape[1]])
    return low * factor, high * factor


_NUMBERS = ["m", "n", "k", "x_m", "w_n", "s_n", "s_b", "each"]


@triton.jit(do_not_specialize=_NUMBERS)
def product(
    x, codes, scale, zero, bias, out,
    m: tl.int32, n: tl.int32, k: tl.int32, x_m: tl.int64, w_n: tl.int64, s_n: tl.int64, s_b: tl.int64, each: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UNIT: tl.constexpr,
    BLOCKS: tl.constexpr, PER: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """x [m, k] times codes [n, k]; program (tile, split of the inner axis).

    With one split `out` is the result, [m, n] contiguous; else float32 [splits, m, n], scaled, for `finish`. A split is
    `each` steps of BLOCK_K long. With BLOCKS there is a scale for each PER steps of the inner axis; with MXFP4 (FOUR is
    "e2m1") one for every 32 columns.
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
    PACK: tl.constexpr = 1 if FOUR == "none" else 2  # columns of the weight in a byte
    inner = tl.arange(0, BLOCK_K)
    left = x + tl.where(good_m, rows, 0).to(tl.int64)[:, None] * x_m
    right = codes + tl.where(good_n, columns, 0).to(tl.int64)[None, :] * w_n
    scales = scale + tl.where(good_n, columns, 0) * s_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    last = tl.minimum((piece + 1) * each, tl.cdiv(k, BLOCK_K))
    for step in range(piece * each, last):
        at = step * BLOCK_K + inner
        along = step * (BLOCK_K // PACK) + tl.arange(0, BLOCK_K // PACK)
        if EVEN_K:
            given = tl.load(left + at[None, :])
            held = tl.load(right + along[:, None])
        else:
            given = tl.load(left + at[None, :], mask=(at < k)[None, :], other=0.0)
            held = tl.load(right + along[:, None], mask=(along < k // PACK)[:, None], other=0.0)
        if FOUR != "none":
            even, odd = tl.split(tl.reshape(given, [BLOCK_M, BLOCK_K // 2, 2]))
            if FOUR == "e2m1":
                evens, odds = scaled_halves(held, scales, step, k, x.dtype.element_ty, ASM)
            else:
                evens, odds = halves(held, x.dtype.element_ty, FOUR, ASM)
        if FOUR == "e2m1":
            acc = tl.dot(odd, odds, tl.dot(even, evens, acc))
        elif BLOCKS:
            here = tl.load(scales + (step // PER) * s_b).to(tl.float32)
            if FOUR == "none":
                part = tl.dot(given, held.to(given.dtype))
            else:
                part = tl.dot(odd, odds, tl.dot(even, evens))
            if ZERO:
                point = tl.load(zero + tl.where(good_n, columns, 0) * s_n + (step // PER) * s_b).to(tl.float32)
                part -= tl.sum(given.to(tl.float32), axis=1)[:, None] * point[None, :]
            acc += part * here[None, :]
        else:
            if FOUR == "none":
                acc = tl.dot(given, held.to(given.dtype), acc)
            else:
                acc = tl.dot(odd, odds, tl.dot(even, evens, acc))
            if ZERO:
                sums += tl.sum(given.to(tl.float32), axis=1)
    if not BLOCKS and FOUR != "e2m1":
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


@triton.jit(do_not_specialize=["n", "blocks_k"])
def widen(
    codes, scale, out, n: tl.int32, blocks_k: tl.int32, ROWS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """MXFP4 codes [n, k / 2] and their powers of two as numbers [n, k]; a tile of BLOCK columns a program."""
    k = blocks_k * 32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    at = tl.where(rows < n, rows, 0).to(tl.int64)
    held = tl.load(codes + at[None, :] * (k // 2) + half[:, None], mask=(half < k // 2)[:, None], other=0)
    low, high = scaled_halves(held, scale + at * blocks_k, tl.program_id(1), k, out.dtype.element_ty, ASM)
    number = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), [ROWS, BLOCK])
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at[:, None] * k + columns[None, :], number, mask=(rows < n)[:, None] & (columns < k)[None, :])


@triton.jit(do_not_specialize=["width", "x_step", "rows", "blocks"])
def encode(
    x, codes, scales, width: tl.int32, x_step: tl.int64, rows: tl.int64, blocks: tl.int32, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A row in codes of E4M3, its largest magnitude the largest code, divided and rounded as the reference does.

    Its scale is written for each of `blocks` blocks, [blocks, rows]. A NaN, or an infinity, is one in the scale.
    """
    row, width, x_step = tl.program_id(0).to(tl.int64), width * UNIT, x_step * UNIT
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_step + lane, mask=lane < width, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of magnitudes, an infinity and NaN at the end
    peak = tl.max(bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(peak, 448.0), 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.where(peak == 0.0, 1.0, scale)
    if (scale > 5.4e-20) & (scale < 1.8e19):  # towards the quotient: for any two of bfloat16 the code is the division's
        inverse = tl.div_rn(1.0, scale)
        near = value * inverse
        near = tl.fma(tl.fma(near, -scale, value), inverse, near)
    else:
        near = tl.div_rn(value, scale)
    near = tl.clamp(near, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + row * width + lane, near.to(codes.dtype.element_ty), mask=lane < width)
    block = tl.arange(0, BLOCKS)
    tl.store(scales + row + block * rows, tl.zeros([BLOCKS], dtype=tl.float32) + scale, mask=block < blocks)
