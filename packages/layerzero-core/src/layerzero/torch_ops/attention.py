"""`lz.attention` inside torch's machinery: it is traced in more ways than its signature tells.

In plain torch it takes `F.scaled_dot_product_attention` wherever that computes exactly the same. What an op cannot
carry (dropout, whose backward must see the same random numbers) runs in plain torch; leading axes are folded and mask
values written out before a graph holds the op. In graphs the op has an overload of its own (`sites`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.errors import InvalidInputError
from layerzero.model.folding import fold, folding_of, is_folded, unfold
from layerzero.model.masks import MASK_VALUES
from layerzero.model.shapes import ordered, ordered_empty
from layerzero.torch_ops import sites
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.lowering import CAUSAL, causal_word, pair
from layerzero.torch_ops.opaque import OpaqueOp

__all__ = ["OPS", "attend", "bridge", "written_out"]

# By name: the reference lives on the floor of the backends, which nothing below may import.
_attention = importlib.import_module("layerzero.backends.reference.attention")

# Device types that know autocast; torch.amp.is_autocast_available breaks the graphs of older Dynamos.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, str causal, Scalar? scale, str layout, "
    "SymInt[]? window, Scalar? softcap, Tensor? alibi_slopes, str? backend=None)"
)


# -- running -------------------------------------------------------------------------------------------
def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    backend: str | None,
    *,
    return_lse: bool = False,
) -> Any:
    found = functions.fastest("attention")(
        query, key, value, attn_mask, 0.0, CAUSAL[causal], scale, layout=layout, window=pair(window), softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_lse, backend=backend,
    )  # fmt: skip
    out, lse = found if return_lse else (found, None)
    # As `_fake` promises: leading axes that were folded have no order of their own.
    out = out.contiguous() if is_folded(query, key, value, layout) else ordered(out, query)
    return out if lse is None else (out, lse.contiguous())


def _run_lse(*args: Any) -> Any:
    return _run(*args, return_lse=True)


# -- shapes --------------------------------------------------------------------------------------------
def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Like the query, as wide as the value; where leading axes broadcast, as they do."""
    # The overload `call` has no layout among its arguments: a graph folds before it calls.
    if not is_folded(query, key, value, rest[3] if len(rest) > 3 else ""):
        return ordered_empty(query, value.shape[-1])
    how = folding_of(query, key, value)
    axes = (*how.lead, how.heads) if how.rank > 2 else ()
    return query.new_empty((*axes, query.shape[-2], value.shape[-1]))


def _fake_lse(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is [B, H, Sq] whatever the layout; [B, Sq] for 3-D inputs."""
    out, layout = _fake(query, key, value, *rest), rest[3]
    shape = out.shape[:-1]
    if len(shape) == 3 and layout == "BSHD":
        shape = torch.Size((shape[0], shape[2], shape[1]))
    return out, query.new_empty(shape, dtype=torch.float32)


# -- plain torch ---------------------------------------------------------------------------------------
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    *,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Attention in any layout and rank, with dropout and log-sum-exp."""
    if is_folded(query, key, value, layout):
        how, query, key, value, attn_mask = fold(query, key, value, attn_mask)
        rest = (attn_mask, causal, scale, layout, window, softcap, alibi_slopes)
        return unfold(attend(query, key, value, *rest, dropout_p=dropout_p, return_lse=return_lse), how)
    if attn_mask is not None and causal != "none":
        raise InvalidInputError(code="MASK_WITH_CAUSAL", value=causal)
    if layout not in ("BHSD", "BSHD"):
        raise InvalidInputError(code="LAYOUT_UNKNOWN", value=str(layout), limit="BHSD, BSHD")
    kind = query.device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    flat = query.dim() == 3
    if flat:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        while attn_mask is not None and attn_mask.dim() < 2:
            attn_mask = attn_mask.unsqueeze(0)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    swapped = layout == "BSHD" and not flat
    if swapped:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    aligned = causal != "bottom_right" or query.shape[2] == key.shape[2]
    fused = aligned and window is None and softcap is None and alibi_slopes is None and not return_lse
    if causal != "none" and scale is not None and scale <= 0:
        fused = False  # torch's fused kernels mask before they scale
    if dropout_p == 1.0:
        fused = False  # nor do all of them take it
    if fused and query.dtype == key.dtype and query.dtype == value.dtype:
        out, lse = _sdpa(query, key, value, attn_mask, dropout_p, causal != "none", scale), None
    else:
        sides = None if window is None else (window[0], window[1])
        found = _attention.attention(
            query, key, value, attn_mask, dropout_p, CAUSAL[causal], scale, sides, softcap, alibi_slopes, return_lse
        )
        out, lse = found if return_lse else (found, None)
    if swapped:
        out = out.transpose(1, 2)
    if flat:
        out, lse = out.squeeze(1), lse if lse is None else lse.squeeze(1)
    return (out, lse) if return_lse else out


def written_out(mask: Any, query: Tensor, key: Tensor, layout: str, window: Any) -> Tensor:
    """A mask value as a boolean mask, once it is known to fit: an opaque op takes tensors only."""
    axis = 1 if layout == "BSHD" or query.dim() == 3 else 2
    rows, cols = query.shape[axis], key.shape[axis]
    heads = 1 if query.dim() == 3 else query.shape[3 - axis]
    dims = {"batch": query.shape[0], "num_heads": heads, "seq_len_q": rows, "seq_len_k": cols}
    mask.check(dims, query.dim(), window)
    dense: Tensor = mask.dense(rows, cols, query.device)
    return dense


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


def _plain(*args: Any) -> Any:
    return attend(*args[:-1])


def _plain_lse(*args: Any) -> Any:
    return attend(*args[:-1], return_lse=True)


OPS = (
    # The fused kernels give no gradient through the log-sum-exp.
    OpaqueOp(
        "attention_lse", f"{_SCHEMA} -> (Tensor, Tensor)", _run_lse, _fake_lse, _plain_lse, autocast=True, replay=False
    ),
    OpaqueOp(
        "attention", f"{_SCHEMA} -> Tensor", _run, _fake, _plain, autocast=True, call=(sites.SIGNATURE, sites.run)
    ),
)


def bridge(args: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    """One call by its canonical arguments through the op."""
    query, key, value, mask, dropout_p, is_causal, scale, window, softcap, slopes, return_lse = args
    if isinstance(mask, MASK_VALUES):
        mask = written_out(mask, query, key, layout or "BHSD", window)
    flat: tuple[Any, ...] = (query, key, value, mask, causal_word(is_causal), scale, layout, window, softcap, slopes)
    if dropout_p:
        return attend(*flat, dropout_p=dropout_p, return_lse=return_lse)
    ops = torch.ops.layerzero
    return (ops.attention_lse if return_lse else ops.attention).default(*flat, backend)
