"""Attention over any number of leading axes, as `F.scaled_dot_product_attention` takes it: broadcast, then folded.

query [..., Hq, Sq, D], key [..., Hk, Sk, D], value [..., Hv, Sk, Dv]. Leading axes broadcast, 2-D inputs have no head
axis, and head counts may differ where they broadcast or where each of Hk and Hv divides Hq (GQA). Kernels see four
axes; `fold` makes them and `unfold` gives the result its own shape again. Reads and reshapes, never computes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.errors import invalid

if TYPE_CHECKING:
    from torch import Tensor


class Folding(NamedTuple):
    """Sizes of a folded call. `scores` is the shape of its scores, which a mask must broadcast to."""

    lead: tuple[int, ...]
    heads: int
    kv_heads: int
    rank: int
    scores: tuple[int, ...]


def is_folded(query: Tensor, key: Tensor, value: Tensor, layout: str) -> bool:
    """Whether a call is not one of three or four axes with equal batches; only with layout BHSD."""
    rank = query.ndim
    if layout != "BHSD" or min(rank, key.ndim, value.ndim) < 2:
        return False
    if not rank == key.ndim == value.ndim or rank not in (3, 4):
        return True
    batch = query.shape[0]
    if not (batch == key.shape[0] and batch == value.shape[0]):
        return True
    return rank == 4 and (key.shape[1] != value.shape[1] or (query.shape[1] == 1 and key.shape[1] != 1))


def folding_of(query: Tensor, key: Tensor, value: Tensor) -> Folding:
    """How a call is folded; what does not broadcast is refused, as torch refuses it."""
    tensors = {"query": query, "key": key, "value": value}
    rank = max(item.ndim for item in tensors.values())
    lead = _broadcast({name: tuple(item.shape[:-3]) for name, item in tensors.items()})
    of_scores = _broadcast({name: tuple(item.shape[:-3]) for name, item in tensors.items() if name != "value"})
    own = {name: item.shape[-3] if item.ndim > 2 else 1 for name, item in tensors.items()}
    heads, key_heads, value_heads = own["query"], own["key"], own["value"]
    if heads == 1:
        heads = key_heads if value_heads == 1 else value_heads
    for count in (key_heads, value_heads):
        if heads % count if count else heads:
            raise invalid("GQA_RATIO_INVALID", own["query"], count)
    if own["query"] == 1 and key_heads not in (1, heads):
        raise invalid("GQA_RATIO_INVALID", value_heads, key_heads)
    kv_heads = key_heads if key_heads == value_heads else heads
    rows: tuple[int, ...] = (query.shape[-2], key.shape[-2])
    if max(query.ndim, key.ndim) > 2:
        rows = (own["query"] if own["query"] != 1 else key_heads, *rows)
    return Folding(lead, heads, kv_heads, rank, of_scores + rows)


def _broadcast(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    found: list[int] = []
    for place in range(1, max(map(len, shapes.values())) + 1):
        sizes = [shape[-place] for shape in shapes.values() if len(shape) >= place]
        size = next((item for item in sizes if item != 1), 1)
        if any(item != 1 and item != size for item in sizes):
            shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise invalid("BATCH_MISMATCH", shown)
        found.append(size)
    return tuple(reversed(found))


def check_mask(mask: Tensor, full: tuple[int, ...], least: int) -> None:
    """Refuse a mask that does not broadcast to the scores, or has fewer than `least` axes."""
    shape = tuple(mask.shape)
    fits = least <= len(shape) <= len(full)
    if not fits or not all(m in (1, f) for m, f in zip(reversed(shape), reversed(full), strict=False)):
        raise invalid("MASK_NOT_BROADCASTABLE", str(shape), str(full))


def fold(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Folding, Tensor, Tensor, Tensor, Any]:
    """The call over four contiguous axes, and what `unfold` needs. Batches that broadcast are written out."""
    how = folding_of(query, key, value)
    if mask is not None and hasattr(mask, "stride"):
        mask = _mask(mask, how)
    folded_key, folded_value = _four(key, how, how.kv_heads), _four(value, how, how.kv_heads)
    return how, _four(query, how, how.heads), folded_key, folded_value, mask


def _four(item: Tensor, how: Folding, heads: int) -> Tensor:
    while item.ndim < max(how.rank, 3):
        item = item.unsqueeze(0)
    rows, width = item.shape[-2:]
    if item.shape[-3] not in (1, heads):
        item = item.repeat_interleave(heads // item.shape[-3], dim=-3)
    return item.expand(*how.lead, heads, rows, width).reshape(math.prod(how.lead), heads, rows, width).contiguous()


def _mask(mask: Tensor, how: Folding) -> Tensor:
    """A mask for [B, H, Sq, Sk]: two axes at least, all leading ones in one."""
    while mask.ndim < 2:
        mask = mask.unsqueeze(0)
    extra = mask.ndim - 3
    if extra <= 0:
        return mask
    own = tuple(mask.shape[-3:])
    if all(size == 1 for size in mask.shape[:extra]):
        return mask.reshape(1, *own)
    return mask.expand(*how.lead, *own).reshape(math.prod(how.lead), *own)


def unfold(out: Any, how: Folding) -> Any:
    """The result in the shape of the call; of a pair the log-sum-exp too."""
    axes = (*how.lead, how.heads) if how.rank > 2 else ()
    if isinstance(out, tuple):
        first, lse = out
        return first.reshape(*axes, *first.shape[-2:]), lse.reshape(*axes, lse.shape[-1])
    return out.reshape(*axes, *out.shape[-2:])
