"""The forward for Hopper, with every step of the pipeline written out in Gluon.

Three warpgroups of a block work at once: one moves keys and values into shared memory, and two of 64 rows each
multiply. A warpgroup issues the product of the next keys before it adds up the values of the last ones, and takes
the softmax of the one while the other is still running. TURNS makes the two warpgroups alternate, so that the
exponentials of one hide behind the products of the other. Keys come from the end backwards: only the first blocks need
a mask.
"""

# Device code: the arguments of a kernel have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["attend"]


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    token, q_column, key_start, column, low, high,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the queries once, then keys and values, block after block from the end."""
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [token, q_column], q_full, q_smem.index(0))
    tma.async_copy_global_to_shared(q_desc, [token + 64, q_column], q_full, q_smem.index(1))
    count = (high - low + BLOCK_N - 1) // BLOCK_N
    last = key_start + low + (count - 1) * BLOCK_N
    for index in range(count):
        stage = index % STAGES
        phase = (index // STAGES) & 1
        row = last - index * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, column], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, column], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _soften(scores, top, total, scale, limit, start, BLOCK_N: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr):
    """Weights of one block, and the new maximum, sum and shrink factor of every row."""
    if MASKED:
        columns = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        scores = gl.where(columns[None, :] < limit[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    shift = new_top
    if MASKED:
        # A row that has seen no key yet: any finite number keeps exp2 away from inf - inf.
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - shift[:, None])
    shrink = gl.exp2(top - shift)
    total = total * shrink + gl.sum(weights, 1)
    return weights, new_top, total, shrink


@gluon.jit
def _step(
    index, acc, found, top, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, other,
    scale, limit, first, dtype: gl.constexpr, layout: gl.constexpr, operand: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Block `index`: its scores are multiplied beside the values of the block before it, whose weights are `found`."""
    stage = index % STAGES
    before = (index - 1) % STAGES
    weights = gl.convert_layout(found.to(dtype), operand)
    mbarrier.wait(k_full.index(stage), (index // STAGES) & 1)
    if TURNS:
        mbarrier.wait(turn, (index - 1) & 1)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout)
    pending = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((index - 1) // STAGES) & 1)
    adding = warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(other)
    scores = warpgroup_mma_wait(1, deps=[pending])
    mbarrier.arrive(k_empty.index(stage))
    found, top, total, shrink = _soften(
        scores, top, total, scale, limit, first - index * BLOCK_N, BLOCK_N, MASKED, layout
    )
    # These values have long come; but the loop inside a wait keeps the assembler from moving what follows up, in
    # front of the softmax, which is to run beside the product.
    mbarrier.wait(v_full.index(before), ((index - 1) // STAGES) & 1)
    acc = warpgroup_mma_wait(0, deps=[adding])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, found, top, total


@gluon.jit
def _consume(
    out, lse, parts, parts_lse, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turn, other,
    token, count, head, key_limit, step, low, high, free, slot, scale, stride_ot, stride_oh, heads_total,
    WHICH: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows over the keys [low, high), at least one."""
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    rows = WHICH * 64 + gl.arange(0, 64, layout=by_row)
    limit = key_limit + step * rows
    blocks = (high - low + BLOCK_N - 1) // BLOCK_N
    masked = gl.maximum((high - free + BLOCK_N - 1) // BLOCK_N, 1)
    first = low + (blocks - 1) * BLOCK_N
    q = q_smem.index(WHICH)
    acc = gl.zeros([64, DIM], gl.float32, sums)
    top = gl.full([64], float("-inf"), gl.float32, by_row)
    total = gl.zeros([64], gl.float32, by_row)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout)
    pending = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(k_empty.index(0))
    if high - first < BLOCK_N:
        # Rows past the end belong to another sequence or group: zero times whatever stands there must stay zero.
        mbarrier.wait(v_full.index(0), 0)
        plain: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DIM, DIM // 8], [4, 1], [1, 0])
        keys = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, plain))
        values = v_smem.index(0).load(plain)
        v_smem.index(0).store(gl.where((keys < high)[:, None], values, 0.0).to(dtype))
        fence_async_shared()
    found, top, total, _ = _soften(scores, top, total, scale, limit, first, BLOCK_N, True, layout)
    for index in range(1, masked):
        acc, found, top, total = _step(
            index, acc, found, top, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, other,
            scale, limit, first, dtype, layout, operand, BLOCK_N, STAGES, True, TURNS,
        )  # fmt: skip
    for index in range(masked, blocks):
        acc, found, top, total = _step(
            index, acc, found, top, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn, other,
            scale, limit, first, dtype, layout, operand, BLOCK_N, STAGES, False, TURNS,
        )  # fmt: skip
    weights = gl.convert_layout(found.to(dtype), operand)
    stage = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((blocks - 1) // STAGES) & 1)
    adding = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[adding])
    seen = total > 0.0
    log = gl.where(seen, (top + gl.log2(gl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    share = gl.convert_layout(gl.where(seen, total, 1.0), gl.SliceLayout(1, sums))
    acc = acc / share[:, None]
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    at = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums))
    if slot < 0:
        place = out + (token + at).to(gl.int64)[:, None] * stride_ot + head * stride_oh + dims[None, :]
        gl.store(place, acc.to(dtype), mask=(at < count)[:, None])
        gl.store(lse + (token + rows).to(gl.int64) * heads_total + head, log, mask=rows < count)
    else:
        gl.store(parts + (slot * 128 + at).to(gl.int64)[:, None] * DIM + dims[None, :], acc)
        gl.store(parts_lse + slot * 128 + rows, log)


@gluon.jit
def attend(
    q_desc, k_desc, v_desc, out, lse, parts, parts_lse, items, scale, stride_ot, stride_oh, heads_total,
    RATIO: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One item of 128 rows; `scale` is in base 2 and above zero."""
    item = items + gl.program_id(0) * 12
    token = gl.load(item)
    count = gl.load(item + 1)
    head = gl.load(item + 2)
    low = gl.load(item + 3)
    high = gl.load(item + 4)
    free = gl.load(item + 5)
    slot = gl.load(item + 6)
    key_start = gl.load(item + 7)
    limit = gl.load(item + 8)
    step = gl.load(item + 9)
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    if TURNS:
        mbarrier.arrive(turns.index(0))
    one: gl.constexpr = 1
    zero: gl.constexpr = 0
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out, lse, parts, parts_lse, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    turns.index(0), turns.index(1), token, count, head, limit, step, low, high, free, slot, scale,
                    stride_ot, stride_oh, heads_total, zero, BLOCK_N, DIM, STAGES, TURNS,
                ),
            ),
            (
                _consume,
                (
                    out, lse, parts, parts_lse, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    turns.index(1), turns.index(0), token, count, head, limit, step, low, high, free, slot, scale,
                    stride_ot, stride_oh, heads_total, one, BLOCK_N, DIM, STAGES, TURNS,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    token, head * DIM, key_start, head // RATIO * DIM, low, high, BLOCK_N, STAGES,
                ),
            ),
        ],
        # The whole last warpgroup produces, though one thread would do: with fewer warps, those to spare wait in other
        # code and set their registers there, while PTX demands the same instruction of a whole warpgroup.
        [4, 4],
        [240, 24],
    )  # fmt: skip
