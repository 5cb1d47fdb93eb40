"""LayerNorm: device code. Sums are taken in float32, the variance around the mean: a row stays in registers between.

Sizes and steps come in units of UNIT elements, as in `kernels.norm`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "width", "x_step", "eps"])
def forward(
    x,
    weight,
    bias,
    out,
    rows: tl.int32,
    width: tl.int32,
    x_step: tl.int64,
    eps: tl.float32,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """ROWS rows at a time, each of them whole in registers. out is contiguous."""
    x_step *= UNIT
    width *= UNIT
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if WEIGHTED:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        far = row.to(tl.int64)[:, None]
        mask = (row < rows)[:, None] & inside[None, :]
        if EVEN and ROWS == 1:
            values = tl.load(x + far * x_step + columns[None, :]).to(tl.float32)
        else:
            values = tl.load(x + far * x_step + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        for _ in tl.static_range(2):  # the second time takes out the rounding error of the first mean
            values -= (tl.sum(values, axis=1) / width)[:, None]
            if not EVEN:
                values = tl.where(inside[None, :], values, 0.0)
        values *= tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)[:, None]
        if WEIGHTED:
            values *= scale[None, :]
        if BIASED:
            values += shift[None, :]
        place = far * width + columns[None, :]
        if EVEN and ROWS == 1:
            tl.store(out + place, values.to(out.dtype.element_ty))
        else:
            tl.store(out + place, values.to(out.dtype.element_ty), mask=mask)
