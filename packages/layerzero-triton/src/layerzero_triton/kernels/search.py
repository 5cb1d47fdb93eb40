"""What the launches of a search for thresholds share: device code. See `sampling`."""

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
    """Mass from each value on of the digit that the launch of this parity has weighed for, within its range, [16]."""
    tile, digit = tl.arange(0, BLOCK_C), tl.arange(0, 16)
    where = 2 * rows * tiles + ((parity * rows + row) * tiles + tile[:, None]) * 16 + digit[None, :]
    there = (tile < tiles)[:, None] & (digit >= 0)[None, :]
    return tl.sum(tl.load(room + where, mask=there, other=0.0), axis=0), digit


@triton.jit
def _reached(state, mass, digits, slot, row, rows, goal):
    """(prefix, digit, mass above the slot's range): the highest digit from which on the goal is reached."""
    prefix = tl.load(state + (slot * rows + row) * 2)
    above = tl.load(state + (slot * rows + row) * 2 + 1).to(tl.float64, bitcast=True)
    return prefix, tl.maximum(tl.max(tl.where(above + mass >= goal, digits, -1), axis=0), 0), above
