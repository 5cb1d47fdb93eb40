"""`lz.attention` in plain torch: it takes `F.scaled_dot_product_attention` wherever that computes exactly the same.

This is traced and differentiated where an opaque op will not do, and runs what an op cannot carry: dropout, whose
backward must see the same random numbers. In graphs the op has an overload of its own (`sites`).

Nested tensors: jagged ones become packed calls of `lz.varlen_attention`, others are refused. A jagged tensor is
[B, H, S, D] or [B, S, H, D] (by `layout`), or [B, S, D] for one head, with S ragged. Its values are already packed, so
nothing is copied, and the result carries the query's own offsets: torch sees the same ragged axis.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.dispatch.adapt import squeeze, swap_back, swap_layout, unsqueeze
from layerzero.errors import InvalidInputError, invalid
from layerzero.model.describe import check_dropout, parse_layout
from layerzero.model.enums import Layout
from layerzero.model.folding import fold, is_folded, unfold
from layerzero.torch_ops.lowering import causal_word
from layerzero.torch_ops.opaque import autocast_dtype
from layerzero.torch_ops.sites import CALL

__all__ = ["CALL", "attend"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_attention = importlib.import_module("layerzero.backends.reference.attention")


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *rest: Any) -> Any:
    """Attention in any layout and rank, with dropout and log-sum-exp: its canonical arguments, then its layout."""
    is_causal, layout = rest[1], rest[-1]
    if is_folded(query, key, value, layout):
        how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
        return unfold(attend(query, key, value, attn_mask, *rest), how)
    if attn_mask is not None and is_causal:
        raise InvalidInputError(code="MASK_WITH_CAUSAL", value=causal_word(is_causal))
    if layout not in ("BHSD", "BSHD"):
        raise InvalidInputError(code="LAYOUT_UNKNOWN", value=str(layout), limit="BHSD, BSHD")
    dtype = autocast_dtype(query.device)
    if dtype is not None and query.dtype != torch.float64:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    values = [query, key, value, attn_mask, *rest[:-1]]
    if query.dim() == 3:
        unsqueeze(values)
        return squeeze(_attend(*values))
    if layout == "BSHD":
        swap_layout(values)
        return swap_back(_attend(*values))
    return _attend(*values)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    sinks: Tensor | None = None,
) -> Any:
    aligned = is_causal != "bottom_right" or query.shape[2] == key.shape[2]
    fused = aligned and window is None and softcap is None and alibi_slopes is None and sinks is None and not return_lse
    if is_causal and scale is not None and scale <= 0:
        fused = False  # torch's fused kernels mask before they scale
    if dropout_p == 1.0:
        fused = False  # nor do all of them take it
    if fused and query.dtype == key.dtype and query.dtype == value.dtype:
        return _sdpa(query, key, value, attn_mask, dropout_p, bool(is_causal), scale)
    rest = (scale, window, softcap, alibi_slopes, return_lse, sinks)
    return _attention.attention(query, key, value, attn_mask, dropout_p, is_causal, *rest)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> Tensor:
    """torch's own attention. Rows that may attend nothing are kept away from it: its kernels disagree about them."""
    grouped = bool(query.shape[1] != key.shape[1])
    if mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, causal, scale=scale, enable_gqa=grouped
        )
    if mask.dtype == torch.bool:
        dead = ~mask.any(dim=-1, keepdim=True)
        mask = mask | dead
    else:
        dead = (mask == -math.inf).all(dim=-1, keepdim=True)
        mask = mask.masked_fill(dead, 0.0).to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=grouped)
    return out.masked_fill(dead, 0.0)


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
