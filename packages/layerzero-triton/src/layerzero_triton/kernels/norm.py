"""RMSNorm and residual add + RMSNorm, plain and Gemma's: device code. Sums are taken in float32.

Sizes and steps come in units of UNIT elements: multiplied by a constant they tell the compiler that rows are aligned,
which lets it load 16 bytes at once, without a compilation for each size.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import wait_for_previous

_NUMBERS = ["rows", "width", "x_step", "residual_step", "eps"]


@triton.jit
def _scale(weight, columns, inside, EVEN: tl.constexpr, GEMMA: tl.constexpr, KEPT: tl.constexpr):
    """The weight as it multiplies the row; KEPT where it should stay in the cache for the next one."""
    if KEPT:
        scale = tl.load(weight + columns, eviction_policy="evict_last").to(tl.float32)
    elif EVEN:
        scale = tl.load(weight + columns).to(tl.float32)
    else:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if GEMMA:
        scale += 1.0
    return scale


@triton.jit(do_not_specialize=_NUMBERS)
def forward(
    x,
    residual,
    weight,
    out,
    stream,
    rows: tl.int32,
    width: tl.int32,
    x_step: tl.int64,
    residual_step: tl.int64,
    eps: tl.float32,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GEMMA: tl.constexpr,
    DEPTH: tl.constexpr,
    AGAIN: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """ROWS rows at a time, each of them whole in registers. out and stream are contiguous.

    With AGAIN a row is read a second time, out of the cache, instead of being held meanwhile: wide rows in registers
    leave an SM so few programs that its loads do not fill the memory's queue. For one row at a time, of a width that is
    a power of two, without a residual.
    """
    wait_for_previous(EARLY)
    x_step *= UNIT
    residual_step *= UNIT
    width *= UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if WEIGHTED and not AGAIN:
        scale = _scale(weight, columns, inside, EVEN, GEMMA, AGAIN)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=DEPTH):
        row = block * ROWS + tl.arange(0, ROWS)
        far = row.to(tl.int64)[:, None]
        if AGAIN:
            values = tl.load(x + far * x_step + columns[None, :], eviction_policy="evict_last").to(tl.float32)
        elif EVEN and ROWS == 1:
            values = tl.load(x + far * x_step + columns[None, :]).to(tl.float32)
        else:
            mask = (row < rows)[:, None] & inside[None, :]
            values = tl.load(x + far * x_step + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        place = far * width + columns[None, :]
        if ADD:
            if EVEN and ROWS == 1:
                values += tl.load(residual + far * residual_step + columns[None, :]).to(tl.float32)
                tl.store(stream + place, values.to(stream.dtype.element_ty))
            else:
                values += tl.load(residual + far * residual_step + columns[None, :], mask=mask, other=0.0).to(
                    tl.float32
                )
                tl.store(stream + place, values.to(stream.dtype.element_ty), mask=mask)
            # The norm is taken of the sum itself, not of what the stream keeps of it: one rounding less.
        mean = tl.sum(values * values, axis=1) / width
        if AGAIN:
            values = tl.load(x + far * x_step + columns[None, :], eviction_policy="evict_first").to(tl.float32)
            if WEIGHTED:
                scale = _scale(weight, columns, inside, EVEN, GEMMA, AGAIN)
        values *= tl.rsqrt(mean + eps)[:, None]
        if WEIGHTED:
            values *= scale[None, :]
        result = values.to(out.dtype.element_ty)
        if EVEN and ROWS == 1:
            tl.store(out + place, result)
        else:
            tl.store(out + place, result, mask=mask)


@triton.jit(do_not_specialize=["rows", "width", "grad_step", "x_step", "eps"])
def backward(
    grad,
    stream_grad,
    x,
    weight,
    x_grad,
    weight_grad,
    rows: tl.int32,
    width: tl.int32,
    grad_step: tl.int64,
    x_step: tl.int64,
    eps: tl.float32,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """The gradient of the normalised row, and the sum of the weight's over the rows of this program.

    weight_grad is [programs, width], float32: one sum a program, added up afterwards in a fixed order. stream_grad is
    contiguous, the gradient that reaches the stored sum directly.
    """
    grad_step *= UNIT
    x_step *= UNIT
    width *= UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if WEIGHTED:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if GEMMA:
            scale += 1.0
    long = width.to(tl.int64)  # a row's number times this must not overflow
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        given = tl.load(grad + row * grad_step + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_step + columns, mask=inside, other=0.0).to(tl.float32)
        spread = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        unit = values * spread
        if WEIGHTED:
            total += given * unit
            given *= scale
        along = tl.sum(given * unit, axis=0) / width
        result = (given - unit * along) * spread
        if ADD:
            result += tl.load(stream_grad + row * long + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_grad + row * long + columns, result.to(x_grad.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(weight_grad + tl.program_id(0) * long + columns, total, mask=inside)
