"""The draw among the tokens that FlashInfer has selected, in one launch: device code (Triton comes with torch).

As torch operations it is some forty launches, each of which takes the host longer than the device. One program a row
ranks the selected, mends ties at the cut, filters, and draws. One token more than wanted is selected: where the last
one equals the last that stays, any of their equals may have been taken, and the row is searched for the lowest ids.
Sums of weights are in float64 and in a fixed order.
"""

import triton
import triton.language as tl

SLACK = tl.constexpr(1e-9)  # mass this close to p counts as reached, as the op has it
BROKEN = tl.constexpr(2147483647)  # the key of NaN, above that of +inf
LOW = tl.constexpr(2147483647)  # the largest id; ids are kept as their distance from it, so that lower ones rank first
FIRST = tl.constexpr(-(1 << 63))  # packed places that do not exist: below all others, and above them
LAST = tl.constexpr((1 << 63) - 1)


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
    return tl.exp(tl.where(key == head, 0.0, _logit(key) - _logit(head)) / warmth)


@triton.jit(do_not_specialize=["vocab", "k", "p", "least", "warmth"])
def draw(
    logits, values, ids, best, uniform, out,
    vocab: tl.int32, k: tl.int32, p: tl.int64, least: tl.int64, warmth: tl.int64,
    SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token of one row: `values` and `ids` are [rows, k + 1] in any order, `best` the row's largest or NaN.

    k is less than SLOTS. `ids` are overwritten where ties are mended. The numbers p (1: no filter), least (min-p; 0: no
    filter) and warmth (the temperature) come as the bits of their float64.
    """
    row = tl.program_id(0).to(tl.int64)
    warm = warmth.to(tl.int64).to(tl.float64, bitcast=True)
    slot = tl.arange(0, SLOTS)
    at = row * (k + 1) + slot
    key = _key(tl.load(values + at, mask=slot <= k, other=0.0))
    id = tl.load(ids + at, mask=slot <= k, other=0).to(tl.int64)
    packed = tl.where(slot <= k, (key.to(tl.int64) << 32) | (LOW - id), FIRST)
    packed = tl.sort(packed, descending=True)  # likeliest first, the lower id first among equals
    keys = (packed >> 32).to(tl.int32)
    tokens = LOW - (packed & LOW).to(tl.int32)
    head = tl.max(keys, axis=0)

    # the lowest ids of those that equal the last one kept, where not all of them are
    cut = tl.sum(tl.where(slot == k - 1, keys, 0), axis=0)
    beyond = tl.sum(tl.where(slot == k, keys, 0), axis=0)
    if cut == beyond:
        tl.debug_barrier()  # every thread has its ids: their room may be written to
        above = tl.sum((keys > cut).to(tl.int32), axis=0)
        found = above
        start = above * 0
        while (found < k) & (start < vocab):
            place = start + tl.arange(0, TILE)
            inside = place < vocab
            other = _key(tl.load(logits + row * vocab + place, mask=inside, other=0.0))
            equal = (inside & (other == cut)).to(tl.int32)
            spot = found + tl.cumsum(equal, axis=0) - 1
            tl.store(ids + row * (k + 1) + spot, place, mask=(equal > 0) & (spot < k))
            found += tl.sum(equal, axis=0)
            start += TILE
        tl.debug_barrier()  # what other threads of this program have written is read next
        ties = (slot >= above) & (slot < tl.minimum(found, k))
        tokens = tl.where(ties, tl.load(ids + at, mask=ties, other=0).to(tl.int32), tokens)

    # every filter keeps the first few of the ranking
    there = slot < k
    weights = tl.where(there, _weight(keys, head, warm), 0.0)
    before = tl.cumsum(weights, axis=0) - weights
    share = p.to(tl.int64).to(tl.float64, bitcast=True)
    goal = tl.where(share < 1.0, (share - SLACK) * tl.sum(weights, axis=0), float("inf"))
    keep = there & (before < goal) & (weights >= least.to(tl.int64).to(tl.float64, bitcast=True))
    count = tl.maximum(tl.sum(keep.to(tl.int32), axis=0), 1)  # the likeliest always stays
    stays = slot < count

    # and the draw, in the order of ids
    packed = (tokens.to(tl.int64) << 32) | (keys.to(tl.int64) & 0xFFFFFFFF)
    packed = tl.sort(tl.where(stays, packed, LAST))
    weights = tl.where(stays, _weight((packed & 0xFFFFFFFF).to(tl.int32), head, warm), 0.0)
    reach = tl.cumsum(weights, axis=0)
    total = tl.max(reach, axis=0)
    # rounding must not carry the target up to the total, where nothing would exceed it
    under = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(tl.load(uniform + row) * total, under)
    hit = tl.min(tl.where((reach > target) & (weights > 0.0), slot, SLOTS), axis=0)
    token = tl.sum(tl.where(slot == hit, packed >> 32, 0), axis=0)
    largest = tl.load(best + row).to(tl.float32)
    nothing = (largest != largest) | (largest == float("-inf"))
    tl.store(out + row, tl.where(nothing, -1, token))
