"""Block sizes, warps and grids by rule, never by a search: nothing is tuned while a request waits.

The rules were chosen from measurements on an H200 (benchmarks/results/h200); each function is pure.
"""

from __future__ import annotations

from dataclasses import dataclass


def next_power(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def unit_of(*steps: int) -> int:
    """16 where every step is a multiple of 16 elements, else 1: the unit in which kernels are told their steps."""
    together = 0
    for step in steps:
        together |= step
    return 1 if together & 15 else 16


_MANY_ROWS = 1024  # fewer do not fill the device, and the second read would only come later


@dataclass(frozen=True, slots=True)
class NormConfig:
    """`rows` rows at a time by `warps` warps; `programs` programs share all rows, loading `depth` steps ahead.

    With `again` a row is read twice, the second time out of the cache, instead of being held in registers.
    """

    rows: int
    warps: int
    programs: int
    depth: int = 1
    again: bool = False


def norm_config(rows: int, width: int, added: bool, twice: bool = False) -> NormConfig:
    """One row a program while it fills four warps; several rows where they are short.

    Wide rows without a residual are read twice where the kernel can (`twice`): measured on an H200, 128.4 µs instead
    of 134.5 for 16 384 rows of 8 192.
    """
    block = next_power(width)
    if twice and not added and width == block == 8192 and rows >= _MANY_ROWS:
        return NormConfig(1, 16, rows, again=True)
    if block <= 1024:
        together = min(32, 2048 // block)
        return NormConfig(together, 4, -(-rows // together))
    if added:
        warps = 8 if block <= 2048 else 16
    else:
        warps = 4 if block <= 4096 else 8
    if block > 8192:
        warps = 16 if block <= 16384 else 32
    return NormConfig(1, warps, rows)


def activation_config(width: int) -> tuple[int, int]:
    """Columns a program, and its warps.

    Eight elements a thread: measured, wide rows want it, cut or whole. Padding beyond a row's end is idle work.
    """
    block = min(4096, next_power(width))
    return block, 16 if block >= 4096 else 8 if block >= 2048 else 4


def rope_config(dim: int, layout: str, tokens: int, full: bool) -> tuple[int, int, int]:
    """Tokens and heads turned at once, and the warps that do it.

    One warp a tile of eight rows, along the axis that is next in memory; rows beyond 128 wide get two.

    Many tokens whose tables hold every angle twice (`full`) are turned two at a time: a tenth less, measured.
    """
    warps = 1 if dim <= 128 else 2
    if full and layout == "BSHD" and dim <= 128 and tokens >= 4096:
        return 2, 8, warps
    return (1, 8, warps) if layout == "BSHD" else (8, 1, warps)


@dataclass(frozen=True, slots=True)
class PagedConfig:
    """Tiles of `block_m` query heads by `block_n` tokens, the context cut into `splits` pieces."""

    block_m: int
    block_n: int
    splits: int
    warps: int = 4
    stages: int = 3


def paged_config(batch: int, kv_heads: int, group: int, longest: int, row_bytes: int, sms: int) -> PagedConfig:
    """As many pieces as give four programs a multiprocessor, none shorter than two tiles.

    `row_bytes` is a head's size in bytes: wide rows leave room for fewer tiles loaded ahead.
    """
    block_m = min(64, max(16, next_power(group)))
    block_n = 32
    programs = batch * kv_heads * -(-group // block_m)
    most = max(1, -(-longest // (2 * block_n)))
    splits = max(1, min(most, 64, 4 * sms // programs))
    return PagedConfig(block_m, block_n, splits, 4, 5 if row_bytes <= 256 else 3 if row_bytes <= 512 else 2)


def fixed_paged_config(group: int, row_bytes: int) -> PagedConfig:
    """Sixteen pieces for any batch and any context."""
    found = paged_config(1, 1, group, 1, row_bytes, 1)
    return PagedConfig(found.block_m, found.block_n, 16, found.warps, found.stages)


def latent_config(batch: int, heads: int, longest: int, row_bytes: int, sms: int) -> PagedConfig:
    """Tiles of heads that share one key: few heads read memory, many multiply.

    `row_bytes` is the size of a latent vector; a tile of them is loaded while the one before is multiplied.
    """
    block_m = min(64, max(16, next_power(heads)))
    block_n = 32 if row_bytes <= 1024 else 16
    programs = batch * -(-heads // block_m)
    room = 2 if block_m <= 32 else 1  # programs of a multiprocessor
    most = max(1, -(-longest // (4 * block_n)))
    splits = max(1, min(most, 16, room * sms // programs))
    return PagedConfig(block_m, block_n, splits, 4 if block_m <= 32 else 8, 2)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Tiles of a product with a quantized weight; the inner axis is cut into `splits`."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


def linear_config(m: int, n: int, k: int, block_size: int | None, sms: int) -> LinearConfig:
    """Few rows read the weight once, cut among all multiprocessors; many rows use square tiles."""
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
    block_n = 64 if m <= 64 and n < 16384 else 128
    block_k = 128 if m <= 64 else 64
    if block_size is not None:  # a step of the inner axis must not cross a block
        while block_size % block_k:
            block_k //= 2
    tiles = -(-m // block_m) * -(-n // block_n)
    steps = -(-k // block_k)
    splits = 1 if tiles >= sms else max(1, min(8, 2 * sms // tiles, steps // 4))
    return LinearConfig(block_m, block_n, block_k, splits, 4 if block_m <= 64 else 8, 4 if block_m <= 32 else 3)


def few_rows_config(m: int, k: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows of the weight a program, its step along them, warps and stages, for at most 32 rows of x.

    Measured on an H200 with the weights of a Llama of 1B: one row takes 4.2 to 117 µs where torch's product takes 6.1
    to 125; 24 rows through gate and up take 18.7 µs, torch's product and the activation behind it 21.
    """
    if m > 1:
        return 64, min(64, next_power(max(16, k))), 4, 4
    block_n, block_k = (8, 512) if gated else (4, 1024)
    return block_n, min(block_k, next_power(k)), 4, 1


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Rows of a tile, and for each of the two products its columns, its step of the inner axis, warps and stages."""

    block_m: int
    first: tuple[int, int, int, int]
    second: tuple[int, int, int, int]


def experts_config(slots: int, experts: int) -> ExpertsConfig:
    """Tiles about as high as an expert has rows: few rows read the weight once, in tiles that fill the device."""
    rows = slots / experts
    if rows <= 12:
        return ExpertsConfig(16, (128, 128, 4, 3), (64, 128, 4, 4))
    if rows <= 24:
        return ExpertsConfig(32, (128, 128, 4, 3), (128, 128, 4, 3))
    if rows <= 40:
        return ExpertsConfig(64, (128, 64, 4, 4), (128, 64, 4, 4))
    if rows <= 96:
        return ExpertsConfig(64, (256, 64, 8, 4), (256, 64, 8, 4))
    return ExpertsConfig(128, (256, 64, 8, 4), (256, 64, 8, 4))


# For any number of rows. Products of 64 rows or more run on the same instructions whatever the tile, and an element's
# sum goes along the inner axis in one order: few rows may have narrow tiles, so that the whole device reads the weight.
FIXED_EXPERTS = ExpertsConfig(64, (128, 64, 4, 3), (128, 64, 4, 3))


def fixed_linear_config(rows: int) -> tuple[int, int, int, int, int]:
    """Rows and columns of a tile, its step of the inner axis, warps and stages."""
    return (64, 32, 128, 4, 4) if rows <= 64 else (128, 128, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class ShortlistConfig:
    """Groups of `group` neighbouring tokens, `many` of them a program of `peak_warps`; a row's draw by `warps`.

    Room for `slots` tokens, `broad` of which are compared with the others at a time.
    """

    group: int
    many: int
    peak_warps: int
    slots: int
    broad: int
    warps: int


SHORTLISTS = (64, 256, 1024)  # room for so many tokens: few, since each is compiled


def shortlist_config(rows: int, vocab: int, k: int, sms: int) -> ShortlistConfig | None:
    """Groups about as many as the tokens of k of them, which one program holds; None where they are too many."""
    slots = next((room for room in SHORTLISTS if k <= room), None)
    if slots is None:
        return None
    group = 16
    while group < 128 and slots * group * group * 2 < vocab:
        group *= 2
    held = max(next_power(-(-vocab // group)), slots * group)
    if held > 16384:
        return None
    tile = 4096 if rows * vocab >= 4096 * 4 * sms else 1024
    return ShortlistConfig(group, tile // group, 4, slots, max(4, 4096 // slots), min(16, held // 512))
