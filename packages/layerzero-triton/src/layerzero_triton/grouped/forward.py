"""The forward kernels: one program for each item of the work list, and the merge of pieces."""

# Device code: the arguments of a kernel have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _steps(
    acc, total, top, q, k_desc, v_desc, key_start, column, low, high, limit, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [low, high) of a sequence; `limit` is looked at only where MASKED."""
    columns = tl.arange(0, BLOCK_N)
    for start in tl.range(low, high, BLOCK_N):
        k = k_desc.load([key_start + start, column])
        scores = tl.dot(q, k.T)
        if MASKED:
            scores = tl.where((start + columns)[None, :] < limit[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            # A row that has seen no key yet: any finite number keeps exp2 away from inf - inf.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            shift = new_top
        weights = tl.math.exp2(scores * scale - shift[:, None])
        shrink = tl.math.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = v_desc.load([key_start + start, column])
        if MASKED:
            # Rows past the end belong to another sequence or group: zero times whatever stands there must stay zero.
            v = tl.where((start + columns)[:, None] < high, v, 0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        top = new_top
    return acc, total, top


@triton.jit
def _rows(tile, head, tokens, limits, PACKED: tl.constexpr, RATIO: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip  # noqa: E501
    """Token (-1 for none), limit and query head of every row of a tile."""
    rows = tl.arange(0, BLOCK_M)
    if PACKED:
        at = rows // RATIO
        valid = at < TOKENS
        heads = head * RATIO + rows % RATIO
    else:
        at = rows
        valid = rows < TOKENS
        heads = head + rows * 0
    token = tl.load(tokens + tile * TOKENS + at, mask=valid, other=-1)
    limit = tl.load(limits + tile * TOKENS + at, mask=valid, other=0)
    return token, limit, heads


@triton.jit
def attend(
    query, k_desc, v_desc, out, lse, parts, parts_lse, items, tokens, limits, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, heads_total,
    PACKED: tl.constexpr, RATIO: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One item: its rows over keys [low, high), to the output or, for a piece, to its slot. `scale` is in base 2."""
    item = items + tl.program_id(0) * 8
    tile = tl.load(item)
    head = tl.load(item + 1)
    low = tl.load(item + 2)
    high = tl.load(item + 3)
    slot = tl.load(item + 4)
    key_start = tl.load(item + 5)
    free = tl.load(item + 6)  # every row sees all keys before this one; a whole number of blocks after low
    token, limit, heads = _rows(tile, head, tokens, limits, PACKED, RATIO, TOKENS, BLOCK_M)
    there = token >= 0
    dims = tl.arange(0, DIM)
    row = token.to(tl.int64)
    q = tl.load(query + row[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=there[:, None], other=0.0)  # fmt: skip  # noqa: E501
    kv_head = head if PACKED else head // RATIO
    column = kv_head * DIM
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, total, top = _steps(
        acc, total, top, q, k_desc, v_desc, key_start, column, low, free, limit, scale, BLOCK_N, False
    )
    acc, total, top = _steps(
        acc, total, top, q, k_desc, v_desc, key_start, column, free, high, limit, scale, BLOCK_N, True
    )
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    log = tl.where(seen, (top + tl.math.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    if slot < 0:
        place = out + row[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None])
        tl.store(lse + row * heads_total + heads, log, mask=there)
    else:
        rows = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(parts + rows[:, None] * DIM + dims[None, :], acc)
        tl.store(parts_lse + rows, log)


@triton.jit
def merge(
    out, lse, parts, parts_lse, merges, tokens, stride_ot, stride_oh, heads_total,
    PACKED: tl.constexpr, RATIO: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The pieces of one tile as one result, always in the same order."""
    entry = merges + tl.program_id(0) * 4
    tile = tl.load(entry)
    head = tl.load(entry + 1)
    first = tl.load(entry + 2)
    count = tl.load(entry + 3)
    inside = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if PACKED:
        at = inside // RATIO
        heads = head * RATIO + inside % RATIO
    else:
        at = inside
        heads = head + inside * 0
    token = tl.load(tokens + tile * TOKENS + at, mask=at < TOKENS, other=-1)
    there = token >= 0
    dims = tl.arange(0, DIM)
    top = tl.full([CHUNK], float("-inf"), dtype=tl.float32)
    for index in range(count):
        top = tl.maximum(top, tl.load(parts_lse + (first + index).to(tl.int64) * BLOCK_M + inside))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([CHUNK], dtype=tl.float32)
    acc = tl.zeros([CHUNK, DIM], dtype=tl.float32)
    for index in range(count):
        rows = (first + index).to(tl.int64) * BLOCK_M + inside
        weight = tl.exp(tl.load(parts_lse + rows) - shift)
        total += weight
        acc += weight[:, None] * tl.load(parts + rows[:, None] * DIM + dims[None, :])
    seen = total > 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    row = token.to(tl.int64)
    place = out + row[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None])
    log = tl.where(seen, shift + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + row * heads_total + heads, log, mask=there)
