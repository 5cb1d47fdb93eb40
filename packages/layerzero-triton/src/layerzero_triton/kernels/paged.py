"""Decode attention over a paged KV cache with the context split among programs: device code.

The queries that share a KV head form one matrix, so that both products run on tensor cores. Each split leaves its own
normalised sum and log-sum-exp; `combine` joins them. Steps come in units of UNIT elements, see `norm`.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import wait_for_previous

_NUMBERS = [
    "group", "heads", "splits", "window", "scale", "softcap", "q_t", "q_h", "k_p", "k_t", "k_h", "v_p", "v_t", "v_h",
    "t_b", "s_b",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def split(
    q, k, v, tables, lengths, slopes, sinks, k_scale, v_scale, out, sums,
    group: tl.int32, heads: tl.int32, splits: tl.int32, window: tl.int32, scale: tl.float32, softcap: tl.float32,
    q_t: tl.int64, q_h: tl.int64, k_p: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_p: tl.int64, v_t: tl.int64, v_h: tl.int64, t_b: tl.int64, s_b: tl.int64,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, LSE: tl.constexpr,
    UNIT: tl.constexpr, TILES: tl.constexpr, SINKS: tl.constexpr,
    KEYS_SCALED: tl.constexpr, VALUES_SCALED: tl.constexpr, EACH_HEAD: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Program (KV head and tile of its queries, split, sequence). With one split `out` is the result itself.

    out is [sequences, heads, splits, DIM] and sums, the log-sum-exp, [sequences, heads, splits], both contiguous. The
    first split begins with the sinks: a score without a value. EACH_HEAD: the scales are one for each KV head.
    """
    wait_for_previous(EARLY)
    q_t, q_h = q_t * UNIT, q_h * UNIT
    k_p, k_t, k_h = k_p * UNIT, k_t * UNIT, k_h * UNIT
    v_p, v_t, v_h = v_p * UNIT, v_t * UNIT, v_h * UNIT
    kv_head = tl.program_id(0) // TILES
    piece = tl.program_id(1)
    batch = tl.program_id(2)
    member = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = member < group
    head = kv_head * group + member
    column = tl.arange(0, BLOCK_D)
    wide = column < DIM
    length = tl.load(lengths + batch).to(tl.int32)
    low = 0
    if WINDOW:
        low = tl.maximum(length - 1 - window, 0)
    first = low // BLOCK_N
    each = tl.cdiv(tl.cdiv(length, BLOCK_N) - first, splits)
    begin = (first + piece * each) * BLOCK_N
    end = tl.minimum((first + (piece + 1) * each) * BLOCK_N, length)

    where = batch * q_t + head[:, None] * q_h + column[None, :]
    queries = tl.load(q + where, mask=mine[:, None] & wide[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(slopes + batch * s_b + head, mask=mine, other=0.0).to(tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=mine, other=float("-inf")).to(tl.float32)
        best = tl.where(piece == 0, sink, best)
        total = tl.where(best == float("-inf"), 0.0, 1.0)
    if KEYS_SCALED:
        scale *= tl.load(k_scale + kv_head * EACH_HEAD).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row = tables + batch * t_b
    keys_of = k + kv_head * k_h + column[None, :]
    values_of = v + kv_head * v_h + column[None, :]
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = token < end
        page = tl.load(row + token // PAGE, mask=there, other=0).to(tl.int64)
        slot = token % PAGE
        if DIM == BLOCK_D:
            mask = there[:, None]
        else:
            mask = there[:, None] & wide[None, :]
        keys = tl.load(keys_of + (page * k_p + slot * k_t)[:, None], mask=mask, other=0.0)
        values = tl.load(values_of + (page * v_p + slot * v_t)[:, None], mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
        if CAP:
            # tanh by way of exp of a number that is not positive, so that nothing overflows
            ratio = scores / softcap
            shrunk = tl.exp(-2.0 * tl.abs(ratio))
            bent = (1.0 - shrunk) / (1.0 + shrunk)
            scores = softcap * tl.where(ratio < 0.0, -bent, bent)
        if ALIBI:
            scores += slope[:, None] * (token - (length - 1))[None, :].to(tl.float32)
        seen = there
        if WINDOW:
            seen = there & (token >= low)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
        shrink = tl.exp2((best - base) * 1.4426950408889634)
        total = total * shrink + tl.sum(weights, axis=1)
        added = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), input_precision="ieee")
        acc = acc * shrink[:, None] + added
        best = now
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if VALUES_SCALED:
        acc *= tl.load(v_scale + kv_head * EACH_HEAD).to(tl.float32)
    place = (batch.to(tl.int64) * heads + head) * splits + piece
    store_mask = mine[:, None] & wide[None, :]
    tl.store(out + place[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    if LSE:
        tl.store(sums + place, best + tl.log(tl.where(total == 0.0, 1.0, total)), mask=mine)


@triton.jit(do_not_specialize=["splits"])
def combine(
    parts, sums, out, lse, splits: tl.int32, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    LSE: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Join the splits of one query head, at most BLOCK_S: weights exp(lse), in a fixed order."""
    wait_for_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    logs = tl.load(sums + place * splits + piece, mask=piece < splits, other=float("-inf"))
    top = tl.max(logs, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(logs - base)
    total = tl.sum(weights, axis=0)
    mask = (piece < splits)[:, None] & (column < DIM)[None, :]
    given = tl.load(parts + (place * splits + piece[:, None]) * DIM + column[None, :], mask=mask, other=0.0)
    joined = tl.sum(given * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * DIM + column, joined.to(out.dtype.element_ty), mask=column < DIM)
    if LSE:
        tl.store(lse + place, top + tl.log(tl.where(total == 0.0, 1.0, total)))
