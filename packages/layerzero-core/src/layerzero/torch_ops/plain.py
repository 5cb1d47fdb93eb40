"""Each op in plain torch, differentiable: what a graph holds where a gradient is needed, and every op's VJP.

The reference, except that attention takes `F.scaled_dot_product_attention` wherever that computes exactly the same.
Arguments are those of the op's schema in `library`; a backend has no say here. It is written for Dynamo to trace.
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
from layerzero.model.folding import fold, is_folded, unfold
from layerzero.model.quant import QuantizedTensor, format_traits
from layerzero.torch_ops.calls import CAUSAL, batch_of

__all__ = ["attend"]


def _reference(module: str) -> Any:
    # By name: the reference lives on the floor of the backends, which nothing below may import.
    return importlib.import_module(f"layerzero.backends.reference.{module}")


# Device types that know autocast; torch.amp.is_autocast_available breaks the graphs of older Dynamos.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu")

_attention = _reference("attention")
_linear = _reference("linear")
_mlp = _reference("mlp")
_norm = _reference("norm")
_paged = _reference("paged")
_positional = _reference("positional")
_quantize = _reference("quantize")


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


def attention(*args: Any) -> Any:
    """Attention; the last argument, the backend, has no say here."""
    return attend(*args[:-1])


def attention_lse(*args: Any) -> Any:
    """Attention with its log-sum-exp."""
    return attend(*args[:-1], return_lse=True)


def page(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_lens: Tensor | None,
    context_host: Sequence[int] | None,
    query_host: Sequence[int] | None,
    scale: float | None,
    layout: str,
    window: Sequence[int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    *,
    return_lse: bool = False,
) -> Any:
    """Paged attention; the host lengths must be given where the tensors have no values (in a traced graph)."""
    sides = None if window is None else (window[0], window[1])
    batch = batch_of(block_tables, context_lens, query_lens, context_host, query_host)
    return _paged.paged_attention(
        query, key_cache, value_cache, batch, scale, sides, softcap, alibi_slopes, return_lse, layout
    )


def paged_attention(*args: Any) -> Any:
    """Paged attention, the output alone."""
    return page(*args[:-1])


def paged_attention_lse(*args: Any) -> Any:
    """Paged attention with its log-sum-exp."""
    return page(*args[:-1], return_lse=True)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, backend: str | None = None) -> Any:
    """RMSNorm."""
    return _norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, backend: str | None = None) -> Any:
    """RMSNorm of a residual stream, and the stream."""
    return _norm.add_rms_norm(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None = None) -> Any:
    """LayerNorm."""
    return _norm.layer_norm(x, weight, bias, eps)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    layout: str,
    position_ids: Tensor | None,
    backend: str | None,
) -> Any:
    """Rotated q and k. Pairs (i, i + rotary/2) are turned half by half: the compiler makes one loop of it."""
    full = cos.dim() == 3  # the two elements of a pair have entries of their own
    half = cos.shape[-1] // 2 if full else cos.shape[-1]
    if interleaved or 2 * half > q.shape[-1]:
        return _positional.rope(q, k, cos, sin, interleaved, layout, position_ids, False)
    seq_len = q.shape[2] if layout == "BHSD" else q.shape[1]
    tables = [_positional._rows(table, position_ids, seq_len) for table in (cos, sin)]
    if tables[0].dim() == 3 or layout != "BHSD":
        tables = [table.unsqueeze(1 if layout == "BHSD" else -2) for table in tables]
    return _halves(q, tables, half, full), None if k is None else _halves(k, tables, half, full)


def _halves(x: Tensor, tables: list[Tensor], half: int, full: bool) -> Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, tables[0].dtype) else torch.float32
    cos, sin = (table.to(wide) for table in tables)
    turning = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    one, two = (part.to(wide) for part in turning.chunk(2, dim=-1))
    if full:
        turned = (one * cos[..., :half] - two * sin[..., :half], two * cos[..., half:] + one * sin[..., half:])
    else:
        turned = (one * cos - two * sin, two * cos + one * sin)
    parts = [part.to(x.dtype) for part in turned]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def rope_query(q: Tensor, *rest: Any) -> Any:
    """Rotated q, where there is no k."""
    return rope(q, None, *rest)[0]


def slopes(num_heads: int, device: torch.device | str | None) -> Any:
    """The ALiBi slope of each head."""
    return _positional.alibi_slopes(num_heads, device=device)


def silu_and_mul(x: Tensor, backend: str | None = None) -> Any:
    """SwiGLU's activation."""
    return _mlp.silu_and_mul(x)


def gelu_and_mul(x: Tensor, approximate: str, backend: str | None = None) -> Any:
    """GeGLU's activation."""
    return _mlp.gelu_and_mul(x, approximate)


def relu_and_mul(x: Tensor, backend: str | None = None) -> Any:
    """ReGLU's activation."""
    return _mlp.relu_and_mul(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str | None = None) -> Any:
    """Linear layer with its activation."""
    return _linear.linear(x, weight, bias, activation)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, backend: str | None = None) -> Any:
    """Embedding lookup."""
    return _linear.embedding(ids, weight, padding_idx)


def dequantize(
    data: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    tensor_scale: Tensor | None,
    fmt: str,
    granularity: str,
    block_size: int | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    backend: str | None,
) -> Any:
    """The tensor that quantized parts stand for."""
    known, _ = format_traits(fmt)
    made = QuantizedTensor(data, scale, known, granularity, tuple(shape), dtype, block_size, zero_point, tensor_scale)
    return _quantize.dequantize(made, dtype)
