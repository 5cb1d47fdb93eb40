"""The other end of a bucket: kernels that tie at one size of it may be far apart at another.

A time speaks for all calls of its bucket, from one more than half its end up to its end. Where several kernels cannot
be told apart at the size that was asked for, they are raced once more where the bucket is furthest from it, and who
falls behind there is written down slower, by the root of how far. On a CPU, where kernels handle whole vectors and the
rest in different ways, odd sizes in between are looked at too: a bucket ends at a power of two, most calls do not. A
short call may be all launch for one kernel, which takes as long at any size, and all work for another: there kernels
count as close that are further apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from layerzero.measurements.believed import TORCH_DEFAULT
from layerzero.model.context import Context
from layerzero.model.op import Op
from layerzero.perfdb.measurement import upper
from layerzero.tuning.inputs import op_named
from layerzero_tune.timing.race import Times

_CLOSE = 0.05  # so near the fastest, another size of the bucket may decide
_CLOSE_SHORT = 0.10  # the same where launches count
_SHORT_US = 100.0
_FAR = 0.05  # who ties at one size and is so far behind at another is raced there twice: it may have been bad luck
# Beside ops of independent rows: their growing sizes can be chosen freely, or (of square attention) together.
_FREE = frozenset({"attention", "paged_attention"})
_GROWING = ("batch", "tokens", "seq_len_q", "seq_len_k", "rows")


def tied(times: Mapping[str, Times], close: float | None = None) -> list[str]:
    """Who is near the fastest; `close` says how near, else the rule for a GPU does."""
    best = min(found.median_us for found in times.values())
    if close is None:
        close = _CLOSE_SHORT if best < _SHORT_US else _CLOSE
    return [name for name, found in times.items() if found.median_us <= best * (1.0 + close)]


def other_end(ctx: Context) -> Context | None:
    """The same call with its growing sizes at the end of the bucket that is further away; None where there is none."""
    return _at(ctx, lambda size, first, last: first if size * size >= first * last else last)


def within(ctx: Context) -> list[Context]:
    """The same call with odd sizes in the middle of the bucket and near its upper end, as far as there are such."""
    middle = _at(ctx, lambda size, first, last: min(last, math.isqrt(first * last) | 1))
    high = _at(ctx, lambda size, first, last: min(last, (last - last // 16) | 1))
    return [item for item in (middle, high) if item is not None]


def _at(ctx: Context, size_of: Callable[[int, int, int], int]) -> Context | None:
    """The call with other growing sizes: by what each is, and where its bucket begins and ends."""
    op = op_named(ctx.op)
    if not (ctx.op in _FREE or (isinstance(op, Op) and op.row_wise)):
        return None
    if ctx.needs_grad or ctx.capturing or "paged_prefill" in ctx.needs:
        return None
    sizes = dict(ctx.dims)
    for name in _GROWING:
        if name in sizes:
            size, last = sizes[name], upper(sizes[name])
            sizes[name] = size_of(size, last // 2 + 1 if size > 1 else size, last)
    dims = tuple(sizes.items())
    return None if dims == tuple(ctx.dims) else replace(ctx, dims=dims)


def far_apart(times: Mapping[str, Times]) -> bool:
    """Whether someone is so far behind that it should be seen twice."""
    us = [found.median_us for found in times.values()]
    return bool(us) and max(us) > min(us) * (1.0 + _FAR)


def confirmed(first: Mapping[str, Times], second: Mapping[str, Times]) -> Mapping[str, Times]:
    """Of two races in one place: each kernel as far behind as it was in the one that went better for it."""
    if set(first) != set(second) or not first:
        return first
    best, best_again = (min(found.median_us for found in times.values()) for times in (first, second))
    return {
        name: replace(found, median_us=min(found.median_us, best * second[name].median_us / best_again))
        for name, found in first.items()
    }


def weighed(times: Mapping[str, Times], *elsewhere: Mapping[str, Times]) -> dict[str, Times]:
    """The times, of those that were raced elsewhere too by the mean of how far behind they are in all places.

    Behind the fastest kernel there: torch's own code is moved with the others, and moves none of them.
    """
    told = dict(times)
    best = [
        min(found.median_us for name, found in place.items() if name != TORCH_DEFAULT or len(place) == 1)
        for place in elsewhere
    ]
    for name in set.intersection(*(set(place) for place in elsewhere)) if elsewhere else ():
        behind = math.prod(place[name].median_us / first for place, first in zip(elsewhere, best, strict=True))
        more = behind ** (1.0 / (1 + len(elsewhere)))
        us = {kind: getattr(times[name], kind) * more for kind in ("median_us", "p95_us", "p99_us")}
        told[name] = replace(times[name], **us)
    return told
