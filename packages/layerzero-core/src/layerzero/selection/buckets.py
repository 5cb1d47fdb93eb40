"""Buckets for sizes that change from call to call, so that a decode loop stays hot.

A bucket ends at every power of two and wherever any kernel's declared limit or any policy rule could
change its mind. Inside one bucket every constraint therefore gives the same answer, and a decision made
for one length holds for all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from layerzero.model.context import Context
from layerzero.model.decision import Bucket
from layerzero.policy.rules import has_exact, thresholds
from layerzero.selection.world import World

_POWERS = tuple(2**i for i in range(48))  # beyond any axis: every length has a bucket


def boundaries(world: World, op: str, axis: str) -> tuple[int, ...] | None:
    """Last values of the buckets of an axis, ascending; None when the axis must be keyed exactly."""
    key = (op, axis)
    if key not in world.memo:
        kernels = world.registry.by_op(op)
        if has_exact(world.policy, op, axis) or any(kernel.exact(axis) for kernel in kernels):
            world.memo[key] = None
        else:
            cuts = {cut for kernel in kernels for cut in kernel.cuts(axis)}
            cuts.update(thresholds(world.policy, op, axis))
            if world.table is not None:
                cuts.update(world.table.edges(op, axis))
            world.memo[key] = tuple(sorted({0, *_POWERS, *(cut for cut in cuts if cut > 0)}))
    return world.memo[key]  # type: ignore[no-any-return]


def find(edges: Sequence[int] | None, value: int) -> tuple[int, int]:
    """The bucket (low, high) that holds a value; exact axes give (value, value)."""
    if edges is None or value > edges[-1]:
        return value, value
    index = bisect_left(edges, value)
    low = edges[index - 1] + 1 if index else value
    return low, edges[index]


def bucketed(world: World, ctx: Context, growing: Sequence[str]) -> tuple[Context, tuple[Bucket, ...]]:
    """The context with each growing size replaced by the end of its bucket, and the buckets."""
    found: list[Bucket] = []
    sizes = dict(ctx.dims)
    for axis in growing:
        if axis in sizes:
            low, high = find(boundaries(world, ctx.op, axis), sizes[axis])
            found.append(Bucket(axis, low, high))
            sizes[axis] = high
    return replace(ctx, dims=tuple(sizes.items())), tuple(found)
