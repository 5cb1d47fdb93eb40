"""Nested tensors given to `lz.attention`: jagged ones become packed calls of `lz.varlen_attention`, others are refused.

A jagged tensor is [B, H, S, D] or [B, S, H, D] (by `layout`), or [B, S, D] for one head, with S ragged. Its values are
already packed, so nothing is copied, and the result carries the query's own offsets: torch sees the same ragged axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.errors import InvalidInputError, invalid
from layerzero.model.describe import check_dropout, parse_layout
from layerzero.model.enums import Layout


class _Packed(NamedTuple):
    tokens: Tensor  # [T, H, D]
    offsets: Tensor
    longest: int | None


def nested_attention(varlen: Callable[..., Any], given: tuple[Any, ...], layout: str, backend: str | None) -> Any:
    """`lz.attention` on jagged tensors, by its arguments before any check. The log-sum-exp is jagged as well.

    `varlen` is the public function, or its twin in a traced graph.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, window, softcap, alibi_slopes, return_lse, *rest = given
    order = parse_layout(layout)
    if attn_mask is not None:
        raise _refused(f"beside an attn_mask ({type(attn_mask).__name__})")
    if check_dropout(dropout_p) > 0.0:
        raise _refused(f"with dropout_p={dropout_p}")
    packed_q, packed_k, packed_v = (
        _unpack(item, name, order) for name, item in (("query", query), ("key", key), ("value", value))
    )
    if len({item.ndim for item in (query, key, value)}) > 1:
        shown = ", ".join(str(item.ndim) for item in (query, key, value))
        raise InvalidInputError(code="RANK_INVALID", value=shown, limit="one rank for query, key and value")
    if packed_v.offsets is not packed_k.offsets and not torch.equal(packed_v.offsets, packed_k.offsets):
        raise invalid("SHAPE_INVALID", f"value {tuple(value.shape)}", f"the lengths of key {tuple(key.shape)}")
    tokens = (packed_q.tokens, packed_k.tokens, packed_v.tokens)
    longest = {"max_seqlen_q": packed_q.longest, "max_seqlen_k": packed_k.longest}
    options = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "return_lse": return_lse}
    options |= dict(zip(("sinks",), rest, strict=False))
    words = {"is_causal": is_causal, "scale": scale, "backend": backend, **longest, **options}
    found = varlen(*tokens, packed_q.offsets, packed_k.offsets, **words)
    out, lse = found if return_lse else (found, None)
    result = _jagged(out, packed_q, query.ndim, order, squeeze=query.ndim == 3)
    if lse is None:
        return result
    # [B, S] for one head, else [B, H, S], as for dense tensors.
    return result, _jagged(lse, packed_q, query.ndim, Layout.BHSD, squeeze=query.ndim == 3)


def _unpack(item: Tensor, name: str, order: Layout) -> _Packed:
    """Values as [T, H, D], offsets and longest length of one jagged tensor."""
    if not item.is_nested:
        raise _refused(f"{name} is a plain tensor beside a nested one")
    if item.layout is not torch.jagged:
        raise _refused(f"{name} of layout torch.strided")
    if item.ndim not in (3, 4):
        raise InvalidInputError(f"{name} has rank {item.ndim}", code="RANK_INVALID", value=item.ndim, limit="4 (or 3)")
    ragged = item._ragged_idx  # type: ignore[attr-defined]
    wanted = 2 if item.ndim == 4 and order is Layout.BHSD else 1
    if ragged != wanted:
        raise _refused(f"{name} ragged in axis {ragged}, for layout {order.value} it is axis {wanted}")
    if item.lengths() is not None:  # type: ignore[attr-defined]
        raise _refused(f"{name} with holes between its sequences; .contiguous() closes them")
    values = item.values()
    if item.ndim == 3:
        values = values.unsqueeze(1)
    elif wanted == 2:
        values = values.transpose(0, 1)
    return _Packed(values, item.offsets(), item._maybe_max_seqlen)  # type: ignore[attr-defined]


def _jagged(packed: Tensor, like: _Packed, rank: int, order: Layout, *, squeeze: bool) -> Tensor:
    """Packed tokens [T, H, …] as a jagged tensor with the offsets of the query."""
    values = packed.squeeze(1) if squeeze else packed
    made = torch.nested.nested_tensor_from_jagged(values, offsets=like.offsets)
    return made.transpose(1, 2) if rank == 4 and order is Layout.BHSD else made


def _refused(what: str) -> InvalidInputError:
    return InvalidInputError(code="RAGGED_UNSUPPORTED", value=what)
