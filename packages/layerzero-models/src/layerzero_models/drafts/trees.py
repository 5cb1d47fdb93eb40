"""`lz.tree_mask`, `lz.tree_positions`: a tree of drafted tokens, verified by one call of attention.

A tree is given by its parents: node i continues parents[i], a node before it, or (with -1) the text so far. All nodes
are fed at once; each may attend the text, its ancestors and itself, so its output is that of the path from the root to
it, run alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerzero.errors import invalid


def tree_mask(
    parents: Tensor | Sequence[int] | Sequence[Sequence[int]],
    prefix_len: int | Tensor = 0,
    *,
    capacity: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which keys each node may attend, for `lz.attention(…, attn_mask=)`: bool [B, 1, N, K].

    `parents` is [N], or [B, N] for one tree a sequence (B is 1 otherwise). The keys lie as in a cache: `prefix_len`
    tokens of text (a number, or one a sequence [B]), then the N nodes, then unused room up to `capacity` keys, by
    default none after the longest sequence. Reads the values of its arguments once: make the mask outside of a
    captured graph.
    """
    tree = checked_parents(parents)
    lengths = _lengths(prefix_len)
    own = _ancestors(tree if tree.ndim == 2 else tree.unsqueeze(0))
    nodes = own.shape[-1]
    needed = (int(lengths.max()) if lengths.numel() else 0) + nodes
    keys = needed if capacity is None else capacity
    if keys < needed:
        raise invalid("VALUE_INVALID", f"capacity {keys}", needed, "the keys do not fit")
    batch = max(own.shape[0], lengths.shape[0])
    if own.shape[0] not in (1, batch) or lengths.shape[0] not in (1, batch):
        raise invalid("BATCH_MISMATCH", f"{own.shape[0]} trees, {lengths.shape[0]} prefixes", "equal numbers, or one")
    node = torch.arange(keys) - lengths.reshape(-1, 1, 1)  # of each key; negative in the text
    seen = (node >= 0) & (node < nodes)
    inside = own.expand(batch, -1, -1).gather(2, node.clamp(0, max(nodes - 1, 0)).expand(batch, nodes, -1))
    return ((node < 0) | (seen & inside)).unsqueeze(1).to(_place(device, parents, prefix_len))


def tree_positions(
    parents: Tensor | Sequence[int] | Sequence[Sequence[int]],
    prefix_len: int | Tensor = 0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Position of each node in its own path, for `lz.rope(…, position_ids=)`: int64 [B, N].

    A node directly below the root stands at `prefix_len`, its children one further. Siblings share a position.
    """
    tree = checked_parents(parents)
    depth = _ancestors(tree if tree.ndim == 2 else tree.unsqueeze(0)).sum(dim=-1) - 1
    return (depth + _lengths(prefix_len).reshape(-1, 1)).to(_place(device, parents, prefix_len))


def checked_parents(parents: object, shape: tuple[int, int] | None = None) -> Tensor:
    """The parents as an int64 tensor on the CPU, every one of them before its child.

    With `shape`, (B, N), they must be [N] or [B, N]; a tensor elsewhere than on the CPU is then not looked into.
    """
    if isinstance(parents, Tensor):
        tree = parents
    else:
        try:
            tree = torch.as_tensor(parents, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise invalid(
                "TYPE_INVALID", f"parents: {type(parents).__name__}", "integers", f"parents: {error}"
            ) from None
    if tree.dtype not in (torch.int64, torch.int32):
        raise invalid("DTYPE_UNSUPPORTED", str(tree.dtype), "int32 or int64", "parents are not indices")
    if tree.ndim not in (1, 2):
        raise invalid("RANK_INVALID", tree.ndim, "1 or 2", "parents")
    if shape is not None and tuple(tree.shape) not in (shape, shape[1:]):
        raise invalid(
            "SHAPE_INVALID", str(tuple(tree.shape)), f"{shape[1:]} or {shape}", "parents do not fit the nodes"
        )
    if shape is not None and not tree.is_cpu:
        return tree
    tree = tree.detach().to("cpu", torch.int64)
    wrong = (tree < -1) | (tree >= torch.arange(tree.shape[-1]))
    if wrong.any():
        where = wrong.nonzero()[0]
        node = int(where[-1])
        parent = int(tree[tuple(where)])
        raise invalid("VALUE_INVALID", f"the parent {parent} of node {node}", f"-1, or a node before {node}")
    return tree


def _ancestors(tree: Tensor) -> Tensor:
    """bool [B, N, N]: whether column j is row i itself or one of its ancestors."""
    batch, nodes = tree.shape
    found = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    rows = torch.arange(batch)
    for i in range(nodes):  # a parent's own row is complete when its child's is made
        parent = tree[:, i]
        found[:, i] |= found[rows, parent.clamp(min=0)] & (parent >= 0).unsqueeze(-1)
    return found


def _lengths(prefix_len: int | Tensor) -> Tensor:
    lengths = prefix_len.detach().to("cpu") if isinstance(prefix_len, Tensor) else prefix_len
    if isinstance(lengths, Tensor):
        whole = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
        fits = whole and lengths.ndim == 1 and (lengths.numel() == 0 or int(lengths.min()) >= 0)
    else:
        fits = isinstance(lengths, int) and not isinstance(lengths, bool) and lengths >= 0
    if not fits:
        raise invalid("VALUE_INVALID", str(lengths), "a length >= 0, or one a row [B]", f"prefix_len is {lengths}")
    return lengths.long() if isinstance(lengths, Tensor) else torch.tensor([lengths])


def _place(device: torch.device | str | None, *given: object) -> torch.device | str:
    """The device asked for, else that of the first tensor given, else the CPU."""
    if device is not None:
        return device
    return next((item.device for item in given if isinstance(item, Tensor)), torch.device("cpu"))
