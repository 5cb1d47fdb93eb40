"""Bucketed keys of attention: the hot key with the KV length replaced by its bucket.

A decode loop meets a new exact key at every step; its bucketed key stays the same until a bucket ends. Both lead to
the same bound kernel, because a decision holds for the whole bucket (`layerzero.selection.world`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerzero.dispatch.hot import key_of
from layerzero.model.describe import stride_class_of

if TYPE_CHECKING:
    from layerzero.model.op import Op
    from layerzero.selection.world import World

_EDGES = "attention edges"


def remember_edges(world: World) -> None:
    """Put the bucket ends of the KV length where `bucketed_key` finds them; None where the length is keyed exactly."""
    from layerzero.selection.world import boundaries

    world.memo[_EDGES] = boundaries(world, "attention", "seq_len_k")


def bucket_ends(world: World) -> tuple[int, ...] | None:
    """What `remember_edges` has put there; None before it did."""
    return world.memo.get(_EDGES)


def buckets_of(world: World, op: str, sizes: tuple[int, ...], *axes: str) -> tuple[int, ...]:
    """The number of the bucket of each size; the size itself on an axis that is keyed exactly."""
    found = world.memo.get((op, axes))
    if found is None:
        from layerzero.selection.world import boundaries

        found = world.memo[op, axes] = [boundaries(world, op, axis) for axis in axes]
    return tuple(
        [size if edges is None else bisect_left(edges, size) for edges, size in zip(found, sizes, strict=True)]
    )


def batch_key(
    op: Op, lengths_of: Callable[..., tuple[tuple[int, ...], Any]], *first: str
) -> Callable[..., tuple[Any, ...]]:
    """The key of an op over a batch of sequences: what follows from its arguments, and the buckets of the lengths.

    So a decode loop stays hot while its contexts grow. `lengths_of` takes the canonical arguments, refuses what no key
    tells, and gives the sizes of the op's growing axes, in order, and what else the key has to hold. `first` are the
    kinds of the first arguments where the op's own would not do (`hot.key_of`).
    """

    def key(world: World, args: tuple[Any, ...], backend: str | None, more: Any = None) -> tuple[Any, ...]:
        lengths, beside = lengths_of(*args)
        buckets = buckets_of(world, op.op_id, lengths, *op.growing)
        return key_of(op, len(args), first)(*args, None, backend), buckets, beside, more

    return key


def bucketed_key(world: World, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The bucketed key of a hot key of `lz.attention`, or None where there is no sound one.

    A mask's shape grows along with the keys, so its calls meet the selection cache instead.
    """
    edges = world.memo.get(_EDGES)
    if edges is None or key[16] is not None:
        return None
    query, keys, values = key[2], key[7], key[12]
    if len(query) != 4 or len(keys) != 4 or len(values) != 4:
        return None
    if key[19] == "BSHD":
        batch, cols, heads, dim = keys
        rows = query[1]
    else:
        batch, heads, cols, dim = keys
        rows = query[2]
    if type(cols) is not int:  # under torch.jit.trace sizes are tensors
        return None
    if values != keys:  # another head_dim for the values: keep all of its shape but the length
        axis = 1 if key[19] == "BSHD" else 2
        if values[axis] != cols:
            return None
        values = (*values[:axis], *values[axis + 1 :])
    else:
        values = None
    if key[5] is True and key[10] is True and key[15] is True:
        lies: Any = True
    else:
        lies = stride_class_of(
            (
                (query, key[5], key[3].itemsize),
                (keys, key[10], key[8].itemsize),
                (key[12], key[15], key[13].itemsize),
            )
        )
    return (
        key[1], query, key[3], key[4], key[6], key[8], key[9], key[11], key[13], key[14], key[17:],
        batch, heads, dim, values, rows < cols, rows == cols, bisect_left(edges, cols), lies,
    )  # fmt: skip
