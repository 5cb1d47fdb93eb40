"""Rotary embedding of q and k in one launch: device code.

A program turns some tokens of some heads of one sequence. Steps come in units of UNIT elements, see `norm`.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.activation import wait_for_previous

_NUMBERS = [
    "seq", "heads_q", "heads_k", "table_rows", "q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "oq_b", "oq_h", "oq_s",
    "ok_b", "ok_h", "ok_s", "t_b", "t_s", "p_b", "p_s",
]  # fmt: skip


@triton.jit
def _angles(table, row, good, ROTARY: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
            INTERLEAVED: tl.constexpr):  # fmt: skip
    """The two factors of each pair, [tokens, BLOCK] each; with one angle a pair they are the same."""
    pair = tl.arange(0, BLOCK)
    mask = good[:, None] & (pair < HALF)[None, :]
    start = table + row[:, None]
    nothing = float("nan")  # a position outside the table must not pass for a result
    if FULL:
        if INTERLEAVED:
            element = tl.arange(0, 2 * BLOCK)
            wide = good[:, None] & (element < ROTARY)[None, :]
            both = tl.load(start + element[None, :], mask=wide, other=nothing).to(tl.float32)
            one, two = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
        else:
            one = tl.load(start + pair[None, :], mask=mask, other=nothing).to(tl.float32)
            two = tl.load(start + HALF + pair[None, :], mask=mask, other=nothing).to(tl.float32)
    else:
        one = tl.load(start + pair[None, :], mask=mask, other=nothing).to(tl.float32)
        two = one
    return one, two


@triton.jit
def _turn(source, target, token, inside, cos, sin, row, good, head, heads, x_h, x_s, o_h, o_s,
          DIM: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
          INTERLEAVED: tl.constexpr, FULL: tl.constexpr, COPY: tl.constexpr, BACKWARD: tl.constexpr):  # fmt: skip
    """Some heads of one tensor, all their loads under way at once; source and target point at the sequence."""
    EVEN: tl.constexpr = BLOCK == HALF
    begin = source + head[None, :, None] * x_h + token[:, None, None] * x_s
    end = target + head[None, :, None] * o_h + token[:, None, None] * o_s
    there = inside[:, None, None] & (head < heads)[None, :, None]
    if INTERLEAVED:
        element = tl.arange(0, 2 * BLOCK)[None, None, :]
        if EVEN:
            mask = there
        else:
            mask = there & (element < ROTARY)
        both = tl.load(begin + element, mask=mask, other=0.0).to(tl.float32)
        one, two = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)[None, None, :]
        if EVEN:
            mask = there
        else:
            mask = there & (pair < HALF)
        one = tl.load(begin + pair, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(begin + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    if COPY:
        rest = ROTARY + tl.arange(0, REST)[None, None, :]
        rest_mask = there & (rest < DIM)
        tl.store(end + rest, tl.load(begin + rest, mask=rest_mask, other=0.0), mask=rest_mask)
    # after the loads above: bringing the angles into their layout takes a barrier, which would hold those up
    cos1, cos2 = _angles(cos, row, good, ROTARY, HALF, BLOCK, FULL, INTERLEAVED)
    sin1, sin2 = _angles(sin, row, good, ROTARY, HALF, BLOCK, FULL, INTERLEAVED)
    if BACKWARD:
        new_one = one * cos1[:, None, :] + two * sin2[:, None, :]
        new_two = two * cos2[:, None, :] - one * sin1[:, None, :]
    else:
        new_one = one * cos1[:, None, :] - two * sin1[:, None, :]
        new_two = two * cos2[:, None, :] + one * sin2[:, None, :]
    if INTERLEAVED:
        mixed = tl.reshape(tl.join(new_one, new_two), (both.shape[0], both.shape[1], 2 * BLOCK))
        tl.store(end + element, mixed.to(target.dtype.element_ty), mask=mask)
    else:
        tl.store(end + pair, new_one.to(target.dtype.element_ty), mask=mask)
        tl.store(end + HALF + pair, new_two.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def rotate(
    q, k, cos, sin, positions, out_q, out_k,
    seq: tl.int32, heads_q: tl.int32, heads_k: tl.int32, table_rows: tl.int32,
    q_b: tl.int64, q_h: tl.int64, q_s: tl.int64, k_b: tl.int64, k_h: tl.int64, k_s: tl.int64,
    oq_b: tl.int64, oq_h: tl.int64, oq_s: tl.int64, ok_b: tl.int64, ok_h: tl.int64, ok_s: tl.int64,
    t_b: tl.int64, t_s: tl.int64, p_b: tl.int64, p_s: tl.int64,
    DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr, PICKED: tl.constexpr, WITH_K: tl.constexpr,
    COPY: tl.constexpr, UNIT: tl.constexpr, BACKWARD: tl.constexpr, HEADS_FIRST: tl.constexpr,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Program (block of tokens and of heads, sequence); the heads of q come first, then those of k.

    Blocks that are neighbours in memory run next to each other: heads of a token, or tokens of a head.
    """
    wait_for_previous(EARLY)
    HALF: tl.constexpr = ROTARY // 2
    q_b, q_h, q_s, oq_b, oq_h, oq_s = q_b * UNIT, q_h * UNIT, q_s * UNIT, oq_b * UNIT, oq_h * UNIT, oq_s * UNIT
    k_b, k_h, k_s, ok_b, ok_h, ok_s = k_b * UNIT, k_h * UNIT, k_s * UNIT, ok_b * UNIT, ok_h * UNIT, ok_s * UNIT
    t_b, t_s = t_b * UNIT, t_s * UNIT
    batch = tl.program_id(1)
    chunks_q = tl.cdiv(heads_q, HEADS)
    if HEADS_FIRST:
        chunks = chunks_q + tl.cdiv(heads_k, HEADS)
        chunk = tl.program_id(0) % chunks
        token = (tl.program_id(0) // chunks) * TOKENS + tl.arange(0, TOKENS)
    else:
        blocks = tl.cdiv(seq, TOKENS)
        chunk = tl.program_id(0) // blocks
        token = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    inside = token < seq
    if PICKED:
        place = tl.load(positions + batch * p_b + token * p_s, mask=inside, other=0).to(tl.int64)
        place = tl.where(place < 0, place + table_rows, place)
    else:
        place = token.to(tl.int64)
    good = inside & (place >= 0) & (place < table_rows)
    row = batch * t_b + place * t_s
    if chunk < chunks_q:
        head = chunk * HEADS + tl.arange(0, HEADS)
        _turn(q + batch * q_b, out_q + batch * oq_b, token, inside, cos, sin, row, good, head, heads_q,
              q_h, q_s, oq_h, oq_s, DIM, ROTARY, HALF, BLOCK, REST, INTERLEAVED, FULL, COPY, BACKWARD)  # fmt: skip
    else:
        if WITH_K:
            head = (chunk - chunks_q) * HEADS + tl.arange(0, HEADS)
            _turn(k + batch * k_b, out_k + batch * ok_b, token, inside, cos, sin, row, good, head, heads_k,
                  k_h, k_s, ok_h, ok_s, DIM, ROTARY, HALF, BLOCK, REST, INTERLEAVED, FULL, COPY, BACKWARD)  # fmt: skip
