"""Sampling with a small top-k: device code. The vocabulary is read once.

`peaks` takes the largest logit of every group of neighbouring tokens. The k likeliest tokens lie in the k groups whose
peaks rank first (among equals the lower group): a token elsewhere has k peaks before it. `shortlist` reads those
groups alone, keeps the k tokens that rank first, filters and draws among them. Tokens stay in the order of their ids
all the way, and sums of weights are in float64 and in a fixed order.
"""

import triton
import triton.language as tl

from layerzero_triton.kernels.search import SLACK, _number

NOTHING = tl.constexpr(-2147483648)  # the key of a place that does not exist, below that of -inf
BROKEN = tl.constexpr(2147483647)  # the key of NaN, above that of +inf


@triton.jit
def _key(logit):
    """An int32, larger for a larger logit and equal for equal ones."""
    wide = logit.to(tl.float32)
    bits = tl.where(wide == 0.0, 0.0, wide).to(tl.int32, bitcast=True)  # both zeros are one
    return tl.where(wide != wide, BROKEN, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _logit(key):
    """The logit of a key, in float64."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _weight(key, head, warmth):
    """exp((logit - head) / warmth) in float64; what equals the head has 1, also where both are infinite."""
    distance = tl.where(key == head, 0.0, _logit(key) - _logit(head))
    return tl.exp(distance / tl.where(warmth > 0.0, warmth, 1.0))


@triton.jit
def _cut(keys, low, head, wanted):
    """(floor, ties): keys above the floor and the first `ties` of those at it are the `wanted` that rank first.

    At least `wanted` keys must be `low` or more, and none above `head`. The search ends as soon as a bound parts
    exactly that many from the rest, which takes a few steps unless keys are equal there.
    """
    bottom = low.to(tl.int64)
    top = head.to(tl.int64) + 1
    least = tl.sum((keys >= low).to(tl.int32), axis=0)  # keys from `bottom` on
    most = least * 0  # keys from `top` on
    while (top - bottom > 1) & (least != wanted):
        middle = bottom + (top - bottom) // 2
        found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = found >= wanted
        bottom = tl.where(enough, middle, bottom)
        least = tl.where(enough, found, least)
        top = tl.where(enough, top, middle)
        most = tl.where(enough, most, found)
    whole = least == wanted
    return tl.where(whole, bottom - 1, bottom).to(tl.int32), tl.where(whole, 0, wanted - most)


@triton.jit
def _stays(keys, floor, ties):
    """(which keys stay, the place of each among those), by their order."""
    above = (keys > floor).to(tl.int32)
    tied = ((keys == floor) & (keys != NOTHING)).to(tl.int32)
    run = tl.cumsum(above + (tied << 16), axis=0)  # both counts at once: neither reaches 2 ** 15
    tied_before = (run >> 16) - tied
    stays = (above > 0) | ((tied > 0) & (tied_before < ties))
    return stays, (run & 0xFFFF) - above + tl.minimum(tied_before, ties)


@triton.jit(do_not_specialize=["groups", "vocab", "step"])
def peaks(
    logits, best, groups: tl.int32, vocab: tl.int32, step: tl.int64,
    GROUP: tl.constexpr, MANY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The key of the largest logit of MANY groups of a row. NaN wins."""
    row = tl.program_id(0)
    group = tl.program_id(1) * MANY + tl.arange(0, MANY)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = place < vocab * UNIT
    values = tl.load(logits + row * (step * UNIT) + place, mask=inside, other=0.0)
    found = tl.max(tl.where(inside, _key(values), NOTHING), axis=1)
    tl.store(best + row.to(tl.int64) * groups + group, found, mask=group < groups)


@triton.jit(do_not_specialize=["groups", "vocab", "step", "k", "p", "min_p", "warmth"])
def shortlist(
    logits, best, slots, p_rows, m_rows, t_rows, uniform, out,
    groups: tl.int32, vocab: tl.int32, step: tl.int64, k: tl.int32, p: tl.int64, min_p: tl.int64, warmth: tl.int64,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, BROAD: tl.constexpr, UNIT: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, P_ROWS: tl.constexpr, M_ROWS: tl.constexpr, T_ROWS: tl.constexpr,
):  # fmt: skip
    """The token of one row. `slots` is room for [rows, 3, SLOTS] int32: groups, then tokens and their keys.

    k is at most SLOTS. BROAD tokens are compared with all others at a time where the masses before them are summed.
    """
    row = tl.program_id(0).to(tl.int64)
    warm = _number(t_rows, warmth, row, T_ROWS)
    chosen, tokens, keys_at = slots + row * 3 * SLOTS, slots + (row * 3 + 1) * SLOTS, slots + (row * 3 + 2) * SLOTS

    # the groups that can hold one of the k
    group = tl.arange(0, GROUPS)
    peak = tl.load(best + row * groups + group, mask=group < groups, other=NOTHING)
    head = tl.max(peak, axis=0)
    lowest = tl.min(tl.where(group < groups, peak, BROKEN), axis=0)
    some = tl.minimum(k, groups)
    floor, ties = _cut(peak, lowest, head, some)
    stays, place = _stays(peak, floor, ties)
    tl.store(chosen + place, group, mask=stays)
    tl.debug_barrier()  # what other threads of this program have written is read next

    # their tokens, and the k of them
    slot = tl.arange(0, SLOTS)
    mine = tl.load(chosen + slot, mask=slot < some, other=0)
    spot = mine[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (slot < some)[:, None] & (spot < vocab * UNIT)
    values = tl.load(logits + row * (step * UNIT) + spot, mask=inside, other=0.0)
    key = tl.reshape(tl.where(inside, _key(values), NOTHING), [SLOTS * GROUP])
    # k peaks are at the floor of the groups or above it; with fewer groups than k, any key may be needed
    low = tl.where(ties > 0, floor, floor + 1)
    low = tl.where(groups >= k, low, NOTHING + 1)
    floor, ties = _cut(key, low, head, k)
    stays, place = _stays(key, floor, ties)
    index = tl.arange(0, SLOTS * GROUP)  # found again rather than kept: registers are short here
    token = tl.load(chosen + index // GROUP, mask=stays, other=0) * GROUP + index % GROUP
    tl.store(tokens + place, token, mask=stays)
    tl.store(keys_at + place, key, mask=stays)
    tl.debug_barrier()

    # filters and the draw, among k tokens in the order of their ids
    there = slot < k
    ids = tl.load(tokens + slot, mask=there, other=0)
    keys = tl.load(keys_at + slot, mask=there, other=NOTHING)
    likeliest = tl.min(tl.where(there & (keys == head), slot, SLOTS), axis=0)
    weights = tl.where(there, _weight(keys, head, warm), 0.0)
    keep = there
    if TOP_P:
        before = tl.zeros([SLOTS], dtype=tl.float64)  # the mass of what ranks before each token
        for start in range(0, SLOTS, BROAD):
            other = start + tl.arange(0, BROAD)
            their = tl.load(keys_at + other, mask=other < k, other=NOTHING)
            mass = tl.where(other < k, _weight(their, head, warm), 0.0)
            first = (their[None, :] > keys[:, None]) | (
                (their[None, :] == keys[:, None]) & (other[None, :] < slot[:, None])
            )
            before += tl.sum(tl.where(first, mass[None, :], 0.0), axis=1)
        share = _number(p_rows, p, row, P_ROWS)
        goal = (share - SLACK) * tl.sum(weights, axis=0)
        keep = there & (before < tl.where(share >= 1.0, float("inf"), goal))
    if MIN_P:
        keep = keep & (weights >= _number(m_rows, min_p, row, M_ROWS))
    keep = keep | (slot == likeliest)
    weights = tl.where(keep, weights, 0.0)
    reach = tl.cumsum(weights, axis=0)
    total = tl.max(reach, axis=0)
    # rounding must not carry the target up to the total, where nothing would exceed it
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    goal_mass = tl.minimum(tl.load(uniform + row) * total, below)
    hit = tl.min(tl.where((reach > goal_mass) & (weights > 0.0), slot, SLOTS), axis=0)
    if T_ROWS:
        hit = tl.where(warm > 0.0, hit, likeliest)
    found = tl.sum(tl.where(slot == hit, ids, 0), axis=0)
    nothing = (head == BROKEN) | (_logit(head) == float("-inf"))
    tl.store(out + row, tl.where(nothing, -1, found).to(tl.int64))
