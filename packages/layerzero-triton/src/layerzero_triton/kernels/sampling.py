"""Top-k, top-p and min-p sampling without a sort: device code.

Tokens are ranked by key, the bits of a logit in an order that integers share, and a filter keeps the tokens above a
threshold key and the first few of those at it. Thresholds are found digit by digit, the highest first: each launch
counts (top-k) or weighs (top-p) the tokens at or above every value of one digit, one tile of the vocabulary a program,
and the next launch reads the digit off. `choose` then weighs what is kept, and `draw` finds the token. All sums of
weights are in float64 and in a fixed order.
"""

import triton
import triton.language as tl

# Mass this close to p counts as reached; the reference has the same slack.
SLACK = tl.constexpr(1e-9)


@triton.jit
def _key(logit, BITS: tl.constexpr):
    """A whole number, larger for a larger logit and equal for equal ones."""
    wide = logit.to(tl.float32)
    wide = tl.where(wide == 0.0, 0.0, wide)  # both zeros are one
    if BITS == 32:
        bits = wide.to(tl.uint32, bitcast=True).to(tl.int64)
        result = tl.where(bits >= 2147483648, 4294967295 - bits, bits + 2147483648)
    else:
        bits = wide.to(logit.dtype).to(tl.uint16, bitcast=True).to(tl.int64)
        result = tl.where(bits >= 32768, 65535 - bits, bits + 32768)
    return result


@triton.jit
def _logit(key, like, BITS: tl.constexpr):
    """The logit of a key, in float64."""
    if BITS == 32:
        bits = tl.where(key >= 2147483648, key - 2147483648, 4294967295 - key)
        result = bits.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        bits = tl.where(key >= 32768, key - 32768, 65535 - key)
        result = bits.to(tl.uint16).to(like.dtype.element_ty, bitcast=True).to(tl.float32).to(tl.float64)
    return result


@triton.jit
def _number(tensor, bits, row, GIVEN: tl.constexpr):
    """A parameter in float64: one a row, or the same for all."""
    if GIVEN:
        result = tl.load(tensor + row).to(tl.float64)
    else:
        result = bits.to(tl.int64).to(tl.float64, bitcast=True)
    return result


@triton.jit
def _weight(logit, head, warmth):
    """exp((logit - head) / warmth) in float64; what equals the head has 1, also where both are infinite."""
    distance = tl.where(logit == head, 0.0, logit - head)
    return tl.exp(distance / tl.where(warmth > 0.0, warmth, 1.0))


@triton.jit
def _tile(logits, row, step, vocab, TILE: tl.constexpr):
    """The logits of this program's tile, and which of its places exist."""
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < vocab
    return tl.load(logits + row * step + place, mask=inside, other=0.0), inside


@triton.jit
def _head(room, row, tiles, BLOCK_C: tl.constexpr):
    """The largest logit of a row; NaN when it holds one."""
    tile = tl.arange(0, BLOCK_C)
    best = tl.load(room + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    top = tl.max(best, axis=0)
    return tl.where(tl.sum((best != best).to(tl.int32), axis=0) > 0, float("nan"), top)


@triton.jit
def _wanted(k_rows, k, row, vocab, K_ROWS: tl.constexpr):
    """How many tokens top-k keeps; zero and less leave the filter out."""
    result = tl.minimum(k, vocab).to(tl.int64)
    if K_ROWS:
        given = tl.load(k_rows + row).to(tl.int64)
        result = tl.where(given <= 0, vocab, tl.minimum(given, vocab))
    return result


@triton.jit
def _counted(state, counts, slot, row, rows, tiles, shift, wanted, BLOCK_C: tl.constexpr):
    """(prefix, tokens above it): the slot's, with the digit at `shift` that its launch has counted for."""
    prefix = tl.load(state + (slot * rows + row) * 2)
    above = tl.load(state + (slot * rows + row) * 2 + 1)
    tile, digit = tl.arange(0, BLOCK_C), tl.arange(0, 256)
    where = (((slot % 2) * rows + row) * tiles + tile[:, None]) * 256 + digit[None, :]
    there = (tile < tiles)[:, None] & (digit >= 0)[None, :]
    found = tl.sum(tl.load(counts + where, mask=there, other=0), axis=0).to(tl.int64)
    # reached[j] is the count of digits from j on
    reached = tl.sum(found, axis=0) - tl.cumsum(found, axis=0) + found + above
    chosen = tl.maximum(tl.max(tl.where(reached >= wanted, digit, -1), axis=0), 0)
    return prefix + (chosen.to(tl.int64) << shift), above + tl.sum(tl.where(digit > chosen, found, 0), axis=0)


@triton.jit
def _masses(room, parity, row, rows, tiles, BLOCK_C: tl.constexpr):
    """Mass at or above each value of the digit that the launch of this parity has weighed for, [16]."""
    tile, digit = tl.arange(0, BLOCK_C), tl.arange(0, 16)
    where = 2 * rows * tiles + ((parity * rows + row) * tiles + tile[:, None]) * 16 + digit[None, :]
    there = (tile < tiles)[:, None] & (digit >= 0)[None, :]
    return tl.sum(tl.load(room + where, mask=there, other=0.0), axis=0), digit


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
    """Mass of this tile's tokens at or above each value of the digit at `shift`, among those that top-k keeps.

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
    if STAGE > 0:
        mass, digits = _masses(room, (slot - 1) % 2, row, rows, tiles, BLOCK_C)
        goals = room + 2 * rows * tiles * 17 + row
        if STAGE == 1:
            goal = (_number(p_rows, p, row, P_ROWS) - SLACK) * tl.sum(tl.where(digits == 0, mass, 0.0), axis=0)
            if here == 0:
                tl.store(goals, goal)
        else:
            goal = tl.load(goals)
        chosen = tl.maximum(tl.max(tl.where(mass >= goal, digits, -1), axis=0), 0)
        prefix = tl.load(state + ((slot - 1) * rows + row) * 2) + (chosen.to(tl.int64) << (shift + 4))
    if here == 0:
        tl.store(state + (slot * rows + row) * 2, prefix)
    values, inside = _tile(logits, row, step, vocab, TILE)
    key = _key(values, BITS)
    weights = tl.where(inside & (key > floor), _weight(values.to(tl.float32).to(tl.float64), head, warm), 0.0)
    target = room + 2 * rows * tiles + (((slot % 2) * rows + row) * tiles + here) * 16
    for digit in tl.static_range(16):
        least = prefix + (tl.full([], digit, dtype=tl.int64) << shift)
        found = tl.sum(tl.where(key >= least, weights, 0.0), axis=0)
        if TOP_K:
            edge = ties.to(tl.float64) * _weight(_logit(floor, logits, BITS), head, warm)
            found += tl.where((here == 0) & (least <= floor), edge, 0.0)
        tl.store(target + digit, found)


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
        chosen = tl.maximum(tl.max(tl.where(mass >= goal, digits, -1), axis=0), 0)
        reached = tl.load(state + (slot * rows + row) * 2) + chosen.to(tl.int64)
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
