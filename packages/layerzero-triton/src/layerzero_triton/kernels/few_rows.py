"""Products of a few rows with a weight, plain or with gate and up in one: device code.

Reading the weight is all the time they take, so a program reads some rows of it once, for all rows of x. The gated form
reads a row of the gate and the row of the same number of up, and rounds only their activated product. Sizes come in
units of UNIT elements, see `norm`.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import _gate, wait_for_previous
from layerzero_triton.kernels.dequant import WIDE_E2M1_ASM, WIDE_INT4_ASM, halves, power_of_two


@triton.jit(do_not_specialize=["n", "k", "w_step"])
def single(
    x, weight, scale, bias, out, n: tl.int32, k: tl.int32, w_step: tl.int64,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, PER: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """One row of x: products in float32, added up at the end.

    FOUR, "int4" or "e2m1": the weight holds two codes a byte, with a scale for each PER columns; blocks are whole.
    """
    wait_for_previous(EARLY)
    k *= UNIT
    w_step *= UNIT
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < n
    start = weight + row[:, None] * w_step
    other = start + n * w_step
    acc = tl.zeros([BLOCK_N, BLOCK_K // (1 if FOUR == "none" else 32)], dtype=tl.float32)
    gated = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for begin in range(0, k, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
        if FOUR != "none":
            held = tl.load(start + (begin // 2 + tl.arange(0, BLOCK_K // 2))[None, :])
            pair = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + begin // 2 + tl.arange(0, BLOCK_K // 2))
            even = pair.to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            odd = (pair >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            block = (begin + 32 * tl.arange(0, BLOCK_K // 32)) // PER
            factor = tl.load(scale + row[:, None] * (k // PER) + block[None, :])
            if FOUR == "e2m1":
                factor = power_of_two(factor, tl.float32)
            if ASM:
                low, high = tl.inline_asm_elementwise(
                    WIDE_INT4_ASM if FOUR == "int4" else WIDE_E2M1_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [held],
                    (tl.int32, tl.int32), is_pure=True, pack=4,
                )  # fmt: skip
                low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
            else:
                low, high = halves(held, tl.float32, FOUR, ASM)
            part = high * odd[None, :]
            if ASM and FOUR == "int4":  # low numbers are 136 too large, high ones 2056
                part -= (136.0 * even + 2056.0 * odd)[None, :]
            part += low * even[None, :]
            # A thread holds 16 bytes: what it adds up has one scale, and threads meet after the loop alone.
            sums = tl.sum(tl.reshape(part, [BLOCK_N, BLOCK_K // 32, 16]), axis=2)
            acc += sums * (16384.0 if ASM and FOUR == "e2m1" else 1.0) * factor
        elif EVEN:
            values = tl.load(start + column[None, :])
            if GATED:
                ups = tl.load(other + column[None, :])
            given = tl.load(x + column).to(tl.float32)
        else:
            mask = inside[:, None] & (column < k)[None, :]
            values = tl.load(start + column[None, :], mask=mask, other=0.0)
            if GATED:
                ups = tl.load(other + column[None, :], mask=mask, other=0.0)
            given = tl.load(x + column, mask=column < k, other=0.0).to(tl.float32)
        if FOUR == "none":
            acc += values.to(tl.float32) * given[None, :]
        if GATED:
            gated += ups.to(tl.float32) * given[None, :]
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if KIND != "none":
        total = _gate(total, KIND)
    if GATED:
        total *= tl.sum(gated, axis=1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "n", "k", "x_step", "w_step"])
def several(
    x, weight, out, m: tl.int32, n: tl.int32, k: tl.int32, x_step: tl.int64, w_step: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    KIND: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """At most BLOCK_M rows of x through gate and up on tensor cores: the weight is the left side of the product."""
    wait_for_previous(EARLY)
    k *= UNIT
    x_step *= UNIT
    w_step *= UNIT
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    inside = row < n
    there = (token < m)[None, :]
    start = weight + row[:, None] * w_step
    other = start + n * w_step
    source = x + token[None, :] * x_step
    gates = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for begin in range(0, k, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
        if EVEN:
            gate = tl.load(start + column[None, :])
            up = tl.load(other + column[None, :])
            given = tl.load(source + column[:, None], mask=there, other=0.0)
        else:
            mask = inside[:, None] & (column < k)[None, :]
            gate = tl.load(start + column[None, :], mask=mask, other=0.0)
            up = tl.load(other + column[None, :], mask=mask, other=0.0)
            given = tl.load(source + column[:, None], mask=there & (column < k)[:, None], other=0.0)
        gates = tl.dot(gate, given, gates)
        ups = tl.dot(up, given, ups)
    made = _gate(gates, KIND) * ups
    place = token.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(out + place, made.to(out.dtype.element_ty), mask=inside[:, None] & there)
