"""Near keys of attention: the hot key with both sequence lengths replaced by their buckets.

A decode loop meets a new exact key at every step; its near key stays the same until a bucket ends. Both lead to
the same bound kernel, because a decision holds for the whole bucket (`layerzero.selection.buckets`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from layerzero.model.describe import stride_class_of

if TYPE_CHECKING:
    from layerzero.selection.world import World

__all__ = ["near_key", "remember_edges"]

_EDGES = "attention edges"


def remember_edges(world: World) -> None:
    """Put the bucket ends of both lengths where `near_key` finds them; nothing when a length must be keyed exactly."""
    from layerzero.selection.buckets import boundaries

    edges = boundaries(world, "attention", "seq_len_q"), boundaries(world, "attention", "seq_len_k")
    world.memo[_EDGES] = None if None in edges else edges


def near_key(world: World, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The near key of a hot key of `lz.attention`, or None where there is no sound one.

    A mask's shape grows along with the keys, so its calls meet the selection cache instead.
    """
    edges = world.memo.get(_EDGES)
    if edges is None or key[16] is not None:
        return None
    query, keys, values = key[2], key[7], key[12]
    if len(query) != 4 or len(keys) != 4 or len(values) != 4:
        return None
    batch, heads, rows, dim = query
    batch_k, heads_k, cols, dim_k = keys
    batch_v, heads_v, cols_v, dim_v = values
    if key[19] == "BSHD":
        heads, rows, heads_k, cols, heads_v, cols_v = rows, heads, cols, heads_k, cols_v, heads_v
    if cols != cols_v or not rows or not cols:
        return None
    edges_q, edges_k = edges
    if rows > edges_q[-1] or cols > edges_k[-1]:
        return None
    if key[5] is True and key[10] is True and key[15] is True:
        lies: Any = True
    else:
        size = key[3].itemsize
        lies = stride_class_of(
            ((query, key[5], size), (keys, key[10], key[8].itemsize), (values, key[15], key[13].itemsize))
        )
    return (
        key[1], key[3], key[4], key[6], key[8], key[9], key[11], key[13], key[14], key[17:],
        batch, heads, dim, batch_k, heads_k, dim_k, batch_v, heads_v, dim_v,
        (rows > cols) - (rows < cols), bisect_left(edges_q, rows), bisect_left(edges_k, cols), lies,
    )  # fmt: skip
