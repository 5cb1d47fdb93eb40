"""The backward kernels: dQ over the tiles of the forward, dK and dV over blocks of keys.

No atomics: a block of keys is owned by one program, which goes over all groups and query heads that see it and sums in
float32, so results are the same bits every time.
"""

# Device code: the arguments of a kernel have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def delta(
    out, grad, found, count, stride_ot, stride_oh, stride_gt, stride_gh, heads_total,
    BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The sum of out * grad over head_dim, for every token and head."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    there = rows < count
    o = tl.load(out + rows[:, None] * stride_ot + head * stride_oh + dims[None, :], mask=there[:, None], other=0.0)
    g = tl.load(grad + rows[:, None] * stride_gt + head * stride_gh + dims[None, :], mask=there[:, None], other=0.0)
    tl.store(found + rows * heads_total + head, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1), mask=there)


@triton.jit
def _query_steps(
    acc, q, g, lse, delta, k_desc, v_desc, key_start, column, low, high, limit, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N):
        k = k_desc.load([key_start + start, column])
        v = v_desc.load([key_start + start, column])
        if MASKED:
            inside = (start + columns)[:, None] < high
            k = tl.where(inside, k, 0.0)
            v = tl.where(inside, v, 0.0)
        weights = tl.math.exp2(tl.dot(q, k.T) * scale - lse[:, None])
        if MASKED:
            weights = tl.where((start + columns)[None, :] < limit[:, None], weights, 0.0)
        scores = weights * (tl.dot(g, v.T) - delta[:, None])
        acc = tl.dot(scores.to(k.dtype), k, acc)
    return acc


@triton.jit
def grad_queries(
    query, k_desc, v_desc, grad, lse, deltas, grad_query, items, tokens, limits, scale, factor,
    stride_qt, stride_qh, stride_gt, stride_gh, stride_dt, stride_dh, heads_total,
    RATIO: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dQ of one item; `scale` is that of the scores in base 2, `factor` the plain one."""
    item = items + tl.program_id(0) * 8
    tile = tl.load(item)
    head = tl.load(item + 1)
    low = tl.load(item + 2)
    high = tl.load(item + 3)
    key_start = tl.load(item + 5)
    free = tl.load(item + 6)
    rows = tl.arange(0, BLOCK_M)
    token = tl.load(tokens + tile * TOKENS + rows, mask=rows < TOKENS, other=-1)
    limit = tl.load(limits + tile * TOKENS + rows, mask=rows < TOKENS, other=0)
    there = token >= 0
    row = token.to(tl.int64)
    dims = tl.arange(0, DIM)
    mask = there[:, None]
    q = tl.load(query + row[:, None] * stride_qt + head * stride_qh + dims[None, :], mask=mask, other=0.0)
    g = tl.load(grad + row[:, None] * stride_gt + head * stride_gh + dims[None, :], mask=mask, other=0.0)
    log = tl.load(lse + row * heads_total + head, mask=there, other=0.0)
    log = tl.where(log == float("-inf"), 0.0, log) * 1.4426950408889634
    minus = tl.load(deltas + row * heads_total + head, mask=there, other=0.0)
    column = head // RATIO * DIM
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    acc = _query_steps(
        acc, q, g, log, minus, k_desc, v_desc, key_start, column, low, free, limit, scale, BLOCK_N, False
    )
    acc = _query_steps(
        acc, q, g, log, minus, k_desc, v_desc, key_start, column, free, high, limit, scale, BLOCK_N, True
    )
    place = grad_query + row[:, None] * stride_dt + head * stride_dh + dims[None, :]
    tl.store(place, (acc * factor).to(grad_query.dtype.element_ty), mask=mask)


@triton.jit
def _key_steps(
    dk, dv, k, v, q_desc, g_desc, lse, deltas, first, low, high, head, base, step, count, keys, scale,
    heads_total, BLOCK_M: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The queries [low, high) of one segment and head: row i sees the keys below base + step * i.

    MASKED where some do not see all keys of this block; RAGGED where rows past `count` belong to another segment.
    """
    rows = tl.arange(0, BLOCK_M)
    for start in tl.range(low, high, BLOCK_M):
        at = start + rows
        q = q_desc.load([first + start, head * DIM])
        g = g_desc.load([first + start, head * DIM])
        place = (first + at).to(tl.int64) * heads_total + head
        if RAGGED:
            log = tl.load(lse + place, mask=at < count, other=0.0)
            minus = tl.load(deltas + place, mask=at < count, other=0.0)
        else:
            log = tl.load(lse + place)
            minus = tl.load(deltas + place)
        if MASKED:
            log = tl.where(log == float("-inf"), 0.0, log)
        log *= 1.4426950408889634
        if RAGGED:
            real = (at < count)[:, None]
            q = tl.where(real, q, 0.0)
            g = tl.where(real, g, 0.0)
        # Transposed: keys down, queries across, so that the sums over queries are plain products.
        weights = tl.math.exp2(tl.dot(k, q.T) * scale - log[None, :])
        if MASKED:
            seen = keys[:, None] < (base + step * at)[None, :]
            if RAGGED:
                seen = seen & (at < count)[None, :]
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(g.dtype), g, dv)
        scores = weights * (tl.dot(v, g.T) - minus[None, :])
        dk = tl.dot(scores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def grad_keys(
    q_desc, k_desc, v_desc, g_desc, lse, deltas, grad_key, grad_value, blocks, segments, scale, factor,
    stride_kt, stride_kh, stride_vt, stride_vh, heads_total, groups, kv_heads,
    RATIO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys: over all groups of its sequence and the query heads of its KV head."""
    program = tl.program_id(0)
    count = tl.num_programs(0) // kv_heads
    kv_head = program // count
    block = blocks + program % count * 4
    sequence = tl.load(block)
    key_start = tl.load(block + 1)
    low = tl.load(block + 2)
    length = tl.load(block + 3)  # of the whole sequence
    keys = low + tl.arange(0, BLOCK_N)
    inside = keys < length
    # Keys past the end belong to another sequence; they only reach rows of dK and dV that are not stored.
    k = k_desc.load([key_start + low, kv_head * DIM])
    v = v_desc.load([key_start + low, kv_head * DIM])
    dk = tl.zeros([BLOCK_N, DIM], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], dtype=tl.float32)
    for pair in range(groups * RATIO):
        segment = segments + (sequence * groups + pair // RATIO) * 4
        first = tl.load(segment)
        rows = tl.load(segment + 1)
        base = tl.load(segment + 2)
        step = tl.load(segment + 3)
        # Rows before `begin` see no key of this block, rows from `free` on see all of them; whole blocks of rows first.
        begin = tl.where(step == 1, tl.maximum(low - base + 1, 0), tl.where(low < base, 0, rows))
        free = tl.where(step == 1, tl.maximum(low + BLOCK_N - base, 0), tl.where(low + BLOCK_N <= base, 0, rows))
        whole = rows // BLOCK_M * BLOCK_M
        ragged = tl.where(begin < rows, whole, rows)
        begin = tl.minimum(begin // BLOCK_M * BLOCK_M, whole)
        free = tl.minimum(tl.maximum((free + BLOCK_M - 1) // BLOCK_M * BLOCK_M, begin), whole)
        head = kv_head * RATIO + pair % RATIO
        dk, dv = _key_steps(
            dk, dv, k, v, q_desc, g_desc, lse, deltas, first, begin, free, head, base, step, rows, keys, scale,
            heads_total, BLOCK_M, DIM, True, False,
        )  # fmt: skip
        dk, dv = _key_steps(
            dk, dv, k, v, q_desc, g_desc, lse, deltas, first, free, whole, head, base, step, rows, keys, scale,
            heads_total, BLOCK_M, DIM, False, False,
        )  # fmt: skip
        dk, dv = _key_steps(
            dk, dv, k, v, q_desc, g_desc, lse, deltas, first, ragged, rows, head, base, step, rows, keys, scale,
            heads_total, BLOCK_M, DIM, True, True,
        )  # fmt: skip
    dims = tl.arange(0, DIM)
    row = (key_start + keys).to(tl.int64)
    place = grad_key + row[:, None] * stride_kt + kv_head * stride_kh + dims[None, :]
    tl.store(place, (dk * factor).to(grad_key.dtype.element_ty), mask=inside[:, None])
    place = grad_value + row[:, None] * stride_vt + kv_head * stride_vh + dims[None, :]
    tl.store(place, dv.to(grad_value.dtype.element_ty), mask=inside[:, None])
