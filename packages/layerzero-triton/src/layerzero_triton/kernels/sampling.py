"""Top-k, top-p and min-p sampling without a sort: device code.

Tokens are ranked by key, the bits of a logit in an order that integers share, and a filter keeps the tokens above a
threshold key and the first few of those at it. Thresholds are found digit by digit, the highest first: each launch
counts (top-k) or weighs (top-p) the tokens at or above every value of one digit, one tile of the vocabulary a program,
and the next launch reads the digit off. Top-p weighs only what the digits found so far leave in question, and passes
over a tile without any, which after a few digits is nearly every one. `choose` then weighs what is kept, and `draw`
finds the token. All sums of weights are in float64 and in a fixed order.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.search import (
    SLACK,
    _counted,
    _head,
    _key,
    _logit,
    _masses,
    _number,
    _reached,
    _tile,
    _wanted,
    _weight,
)


@triton.jit(do_not_specialize=["rows", "tiles", "vocab", "step"])
def heads(
    logits, room, counts, rows: tl.int32, tiles: tl.int32, vocab: tl.int32, step: tl.int64,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest logit of each tile and the first place that holds it. NaN wins."""
    row = tl.program_id(0)
    values, inside = _tile(logits, row, step, vocab, TILE)
    values = tl.where(inside, values.to(tl.float32), float("-inf"))
    broken = tl.sum((values != values).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    place = tl.arange(0, TILE)
    first = tl.min(tl.where((values == top) & inside, place, TILE), axis=0)
    here = row * tiles + tl.program_id(1)
    tl.store(room + here, tl.where(broken, float("nan"), top).to(tl.float64))
    tl.store(counts + here, tl.program_id(1) * TILE + first)


@triton.jit(do_not_specialize=["rows", "tiles", "vocab", "step", "k", "slot", "shift"])
def count(
    logits, counts, state, k_rows, rows: tl.int32, tiles: tl.int32, vocab: tl.int32, step: tl.int64, k: tl.int64,
    slot: tl.int32, shift: tl.int32, TILE: tl.constexpr, BLOCK_C: tl.constexpr, BITS: tl.constexpr,
    FIRST: tl.constexpr, K_ROWS: tl.constexpr,
):  # fmt: skip
    """Tokens of this tile by their digit at `shift`, among those with the digits found so far."""
    row = tl.program_id(0)
    base = counts + 2 * rows * tiles
    prefix = tl.full([], 0, dtype=tl.int64)
    above = tl.full([], 0, dtype=tl.int64)
    if not FIRST:
        wanted = _wanted(k_rows, k, row, vocab, K_ROWS)
        prefix, above = _counted(state, base, slot - 1, row, rows, tiles, shift + 8, wanted, BLOCK_C)
    if tl.program_id(1) == 0:
        tl.store(state + (slot * rows + row) * 2, prefix)
        tl.store(state + (slot * rows + row) * 2 + 1, above)
    values, inside = _tile(logits, row, step, vocab, TILE)
    key = _key(values, BITS)
    same = inside & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
    digit = ((key >> shift) & 255).to(tl.int32)
    found = tl.histogram(digit, 256, mask=same)
    where = (((slot % 2) * rows + row) * tiles + tl.program_id(1)) * 256 + tl.arange(0, 256)
    tl.store(base + where, found)


@triton.jit(
    do_not_specialize=["rows", "tiles", "vocab", "step", "k", "p", "warmth", "count_slot", "edge_slot", "slot", "shift"]
)
def weigh(
    logits, room, counts, state, k_rows, p_rows, t_rows,
    rows: tl.int32, tiles: tl.int32, vocab: tl.int32, step: tl.int64, k: tl.int64, p: tl.int64, warmth: tl.int64,
    count_slot: tl.int32, edge_slot: tl.int32, slot: tl.int32, shift: tl.int32,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr, BITS: tl.constexpr, STAGE: tl.constexpr, TOP_K: tl.constexpr,
    K_ROWS: tl.constexpr, P_ROWS: tl.constexpr, T_ROWS: tl.constexpr,
):  # fmt: skip
    """Mass of this tile's tokens from each value of the digit at `shift` on, among those that top-k keeps.

    Only of tokens with the digits found so far: the mass above them is carried from launch to launch.
    STAGE is 0 for the first digit, 1 for the second, where the goal becomes known, and 2 for the others. The last slot
    of `count` is count_slot; the top-k threshold and how many tokens at it stay are left in edge_slot; slot is this
    launch's own, and the one before it was the last launch's.
    """
    row = tl.program_id(0)
    here = tl.program_id(1)
    head = _head(room, row, tiles, BLOCK_C)
    warm = _number(t_rows, warmth, row, T_ROWS)
    floor = tl.full([], -1, dtype=tl.int64)  # the top-k threshold: tokens above it stay
    ties = tl.full([], 0, dtype=tl.int64)
    if TOP_K:
        if STAGE == 0:
            wanted = _wanted(k_rows, k, row, vocab, K_ROWS)
            floor, above = _counted(state, counts + 2 * rows * tiles, count_slot, row, rows, tiles, 0, wanted, BLOCK_C)
            ties = wanted - above
            if here == 0:
                tl.store(state + (edge_slot * rows + row) * 2, floor)
                tl.store(state + (edge_slot * rows + row) * 2 + 1, ties)
        else:
            floor = tl.load(state + (edge_slot * rows + row) * 2)
            ties = tl.load(state + (edge_slot * rows + row) * 2 + 1)
    prefix = tl.full([], 0, dtype=tl.int64)
    carried = tl.full([], 0.0, dtype=tl.float64)
    if STAGE > 0:
        mass, digits = _masses(room, (slot - 1) % 2, row, rows, tiles, BLOCK_C)
        goals = room + 2 * rows * tiles * 17 + row
        if STAGE == 1:
            goal = (_number(p_rows, p, row, P_ROWS) - SLACK) * tl.sum(tl.where(digits == 0, mass, 0.0), axis=0)
            if here == 0:
                tl.store(goals, goal)
        else:
            goal = tl.load(goals)
        prefix, chosen, carried = _reached(state, mass, digits, slot - 1, row, rows, goal)
        prefix += chosen.to(tl.int64) << (shift + 4)
        carried += tl.sum(tl.where(digits == chosen + 1, mass, 0.0), axis=0)
    if here == 0:
        tl.store(state + (slot * rows + row) * 2, prefix)
        tl.store(state + (slot * rows + row) * 2 + 1, carried.to(tl.int64, bitcast=True))
    values, inside = _tile(logits, row, step, vocab, TILE)
    key = _key(values, BITS)
    distance = (key - prefix) >> shift  # the digit, where the ones before it are those of the prefix
    asked = inside & (key > floor) & (distance >= 0) & (distance < 16)
    target = room + 2 * rows * tiles + (((slot % 2) * rows + row) * tiles + here) * 16
    edge = tl.full([], 0.0, dtype=tl.float64)
    edge_digit = (floor - prefix) >> shift
    if TOP_K:
        edge = ties.to(tl.float64) * _weight(_logit(floor, logits, BITS), head, warm)
        edge = tl.where((here == 0) & (edge_digit < 16), edge, 0.0)
    if tl.sum(asked.to(tl.int32), axis=0) > 0:
        weights = tl.where(asked, _weight(values.to(tl.float32).to(tl.float64), head, warm), 0.0)
        digit = distance.to(tl.int32)
        for least in tl.static_range(16):
            found = tl.sum(tl.where(digit >= least, weights, 0.0), axis=0)
            tl.store(target + least, found + tl.where(edge_digit >= least, edge, 0.0))
    else:
        every = tl.arange(0, 16)
        tl.store(target + every, tl.where(edge_digit >= every, edge, 0.0))


@triton.jit(
    do_not_specialize=[
        "rows", "tiles", "vocab", "step", "k", "p", "min_p", "warmth", "count_slot", "edge_slot", "slot", "end_slot"
    ]
)  # fmt: skip
def choose(
    logits, room, counts, state, k_rows, p_rows, m_rows, t_rows,
    rows: tl.int32, tiles: tl.int32, vocab: tl.int32, step: tl.int64, k: tl.int64, p: tl.int64, min_p: tl.int64,
    warmth: tl.int64, count_slot: tl.int32, edge_slot: tl.int32, slot: tl.int32, end_slot: tl.int32,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr, BITS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    MIN_P: tl.constexpr, K_ROWS: tl.constexpr, P_ROWS: tl.constexpr, M_ROWS: tl.constexpr, T_ROWS: tl.constexpr,
):  # fmt: skip
    """The final threshold, and for this tile the mass above it and the number of tokens at it.

    end_slot gets the threshold and how many tokens at it top-k leaves; `draw` settles what top-p leaves of them.
    """
    row = tl.program_id(0)
    here = tl.program_id(1)
    head = _head(room, row, tiles, BLOCK_C)
    warm = _number(t_rows, warmth, row, T_ROWS)
    floor = tl.full([], -1, dtype=tl.int64)
    ties = tl.full([], 0, dtype=tl.int64)
    if TOP_K:
        if TOP_P:
            floor = tl.load(state + (edge_slot * rows + row) * 2)
            ties = tl.load(state + (edge_slot * rows + row) * 2 + 1)
        else:
            wanted = _wanted(k_rows, k, row, vocab, K_ROWS)
            floor, above = _counted(state, counts + 2 * rows * tiles, count_slot, row, rows, tiles, 0, wanted, BLOCK_C)
            ties = wanted - above
    if TOP_P:
        mass, digits = _masses(room, slot % 2, row, rows, tiles, BLOCK_C)
        goal = tl.load(room + 2 * rows * tiles * 17 + row)
        reached, chosen, _ = _reached(state, mass, digits, slot, row, rows, goal)
        reached += chosen.to(tl.int64)
        # beyond the likeliest there is nothing to keep; top-p of one keeps all that top-k keeps
        reached = tl.minimum(reached, _key(head.to(tl.float32).to(logits.dtype.element_ty), BITS))
        whole = _number(p_rows, p, row, P_ROWS) >= 1.0
        ties = tl.where(whole | (reached == floor), ties, vocab)
        floor = tl.where(whole, floor, tl.maximum(reached, floor))
    if here == 0:
        tl.store(state + (end_slot * rows + row) * 2, floor)
        tl.store(state + (end_slot * rows + row) * 2 + 1, ties)
    values, inside = _tile(logits, row, step, vocab, TILE)
    key = _key(values, BITS)
    weights = tl.where(inside & (key > floor), _weight(values.to(tl.float32).to(tl.float64), head, warm), 0.0)
    at = row * tiles + here
    tl.store(counts + rows * tiles + at, tl.sum((inside & (key == floor)).to(tl.int32), axis=0))
    if TOP_P:  # before min-p, which comes after top-p
        tl.store(room + 2 * rows * tiles * 17 + rows + at, tl.sum(weights, axis=0))
    if MIN_P:
        weights = tl.where(weights >= _number(m_rows, min_p, row, M_ROWS), weights, 0.0)
    tl.store(room + rows * tiles + at, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["rows", "tiles", "vocab", "step", "p", "min_p", "warmth", "end_slot", "uniform_step"])
def draw(
    logits, room, counts, state, p_rows, m_rows, t_rows, uniform, out,
    rows: tl.int32, tiles: tl.int32, vocab: tl.int32, step: tl.int64, p: tl.int64, min_p: tl.int64, warmth: tl.int64,
    end_slot: tl.int32,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr, BITS: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    P_ROWS: tl.constexpr, M_ROWS: tl.constexpr, T_ROWS: tl.constexpr,
):  # fmt: skip
    """The first kept token, in the order of ids, whose cumulative weight exceeds a uniform share of the total."""
    row = tl.program_id(0)
    head = _head(room, row, tiles, BLOCK_C)
    warm = _number(t_rows, warmth, row, T_ROWS)
    floor = tl.load(state + (end_slot * rows + row) * 2)
    ties = tl.load(state + (end_slot * rows + row) * 2 + 1)
    tile = tl.arange(0, BLOCK_C)
    there = tile < tiles
    edge = tl.full([], 0.0, dtype=tl.float64)
    if floor >= 0:
        edge = _weight(_logit(floor, logits, BITS), head, warm)
    if TOP_P:
        goal = tl.load(room + 2 * rows * tiles * 17 + row)
        mass = tl.load(room + 2 * rows * tiles * 17 + rows + row * tiles + tile, mask=there, other=0.0)
        missing = (goal - tl.sum(mass, axis=0)) / tl.where(edge > 0.0, edge, 1.0)
        few = tl.maximum(tl.minimum(tl.ceil(missing), 2147483647.0), 0.0).to(tl.int64)
        whole = _number(p_rows, p, row, P_ROWS) >= 1.0
        ties = tl.where(whole, ties, tl.minimum(few, ties))
    likeliest = _key(head.to(tl.float32).to(logits.dtype.element_ty), BITS)
    ties = tl.where(floor == likeliest, tl.maximum(ties, 1), ties)  # the likeliest always stays
    least = tl.full([], 0.0, dtype=tl.float64)
    if MIN_P:
        least = _number(m_rows, min_p, row, M_ROWS)
        edge = tl.where(edge >= least, edge, 0.0)
    equal = tl.load(counts + rows * tiles + row * tiles + tile, mask=there, other=0).to(tl.int64)
    before = tl.cumsum(equal, axis=0) - equal
    kept = tl.maximum(tl.minimum(ties - before, equal), 0)
    masses = tl.load(room + rows * tiles + row * tiles + tile, mask=there, other=0.0) + kept.to(tl.float64) * edge
    reach = tl.cumsum(masses, axis=0)
    total = tl.max(reach, axis=0)
    # rounding must not carry the target up to the total, where nothing would exceed it
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    goal_mass = tl.minimum(tl.load(uniform + row) * total, below)
    found = tl.minimum(tl.sum((there & (reach <= goal_mass)).to(tl.int32), axis=0), tiles - 1)
    here = tile == found
    start = tl.sum(tl.where(here, reach - masses, 0.0), axis=0)
    stay = tl.sum(tl.where(here, kept, 0), axis=0)

    place = tl.arange(0, TILE)
    inside = found * TILE + place < vocab
    values = tl.load(logits + row * step + found * TILE + place, mask=inside, other=0.0)
    key = _key(values, BITS)
    tied = (inside & (key == floor)).to(tl.int64)
    stays = inside & ((key > floor) | ((tied > 0) & (tl.cumsum(tied, axis=0) - tied < stay)))
    weights = tl.where(stays, _weight(values.to(tl.float32).to(tl.float64), head, warm), 0.0)
    if MIN_P:
        weights = tl.where(weights >= least, weights, 0.0)
    run = start + tl.cumsum(weights, axis=0)
    hit = tl.min(tl.where((run > goal_mass) & (weights > 0.0), place, TILE), axis=0)
    last = tl.max(tl.where(weights > 0.0, place, -1), axis=0)
    token = found * TILE + tl.where(hit < TILE, hit, last)
    if T_ROWS:
        best = tl.load(room + row * tiles + tile, mask=there, other=float("-inf"))
        firsts = tl.load(counts + row * tiles + tile, mask=there, other=2147483647)
        greedy = tl.min(tl.where(best == head, firsts, 2147483647), axis=0)
        token = tl.where(warm > 0.0, token, greedy)
    nothing = (head != head) | (head == float("-inf"))
    tl.store(out + row, tl.where(nothing, -1, token).to(tl.int64))
