"""Decode by latent attention over pages, the context split among programs: device code. `paged.combine` joins them.

The heads share one key, [latent, rotated], whose latent part is the value as well: a tile of it is loaded once and goes
into both products. Steps come in units of UNIT elements, see `norm`.
"""

import triton
import triton.language as tl

_NUMBERS = ["heads", "splits", "scale", "q_t", "q_h", "r_t", "r_h", "k_p", "k_t", "e_p", "e_t", "t_b"]


@triton.jit(do_not_specialize=_NUMBERS)
def latent(
    q, rotated, k, e, tables, lengths, out, sums,
    heads: tl.int32, splits: tl.int32, scale: tl.float32,
    q_t: tl.int64, q_h: tl.int64, r_t: tl.int64, r_h: tl.int64, k_p: tl.int64, k_t: tl.int64, e_p: tl.int64,
    e_t: tl.int64, t_b: tl.int64,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LSE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (tile of heads, split, sequence). With one split `out` is the result itself.

    q [sequences, heads, DIM] and rotated [sequences, heads, REST]; pages k [blocks, PAGE, DIM] and e [blocks, PAGE,
    REST]. out is [sequences, heads, splits, DIM] and sums, the log-sum-exp, [sequences, heads, splits].
    """
    q_t, q_h, r_t, r_h = q_t * UNIT, q_h * UNIT, r_t * UNIT, r_h * UNIT
    k_p, k_t, e_p, e_t = k_p * UNIT, k_t * UNIT, e_p * UNIT, e_t * UNIT
    piece = tl.program_id(1)
    batch = tl.program_id(2)
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = head < heads
    column = tl.arange(0, BLOCK_D)
    wide = column < DIM
    other = tl.arange(0, BLOCK_R)
    far = other < REST
    length = tl.load(lengths + batch).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = piece * each * BLOCK_N
    end = tl.minimum((piece + 1) * each * BLOCK_N, length)

    where = batch * q_t + head[:, None] * q_h + column[None, :]
    queries = tl.load(q + where, mask=mine[:, None] & wide[None, :], other=0.0)
    where = batch * r_t + head[:, None] * r_h + other[None, :]
    turned = tl.load(rotated + where, mask=mine[:, None] & far[None, :], other=0.0)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row = tables + batch * t_b
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = token < end
        page = tl.load(row + token // PAGE, mask=there, other=0).to(tl.int64)
        slot = token % PAGE
        if DIM == BLOCK_D:
            mask = there[:, None]
        else:
            mask = there[:, None] & wide[None, :]
        keys = tl.load(k + (page * k_p + slot * k_t)[:, None] + column[None, :], mask=mask, other=0.0)
        rest_mask = there[:, None] & far[None, :]
        rest = tl.load(e + (page * e_p + slot * e_t)[:, None] + other[None, :], mask=rest_mask, other=0.0)
        keys = keys.to(queries.dtype)
        rest = rest.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        now = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2((scores - now[:, None]) * 1.4426950408889634)
        shrink = tl.exp2((best - now) * 1.4426950408889634)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(queries.dtype), keys, acc, input_precision="ieee")
        best = now
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (batch.to(tl.int64) * heads + head) * splits + piece
    store_mask = mine[:, None] & wide[None, :]
    tl.store(out + place[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    if LSE:
        tl.store(sums + place, best + tl.log(tl.where(total == 0.0, 1.0, total)), mask=mine)
