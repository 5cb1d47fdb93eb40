"""xFormers' memory-efficient attention, one adapter for each of its inner operators.

Inputs come in xFormers' own order [B, S, H, D]. Fewer key heads than query heads go in as five dimensions,
[B, S, G, H/G, D] with key and value expanded (stride 0, nothing copied); xFormers has no backward for that form, so a
call that needs gradients repeats the key heads instead. The library is imported with this module, which happens when
a kernel is bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias, cutlass, flash, triton_splitk

from layerzero.model.attention import upright
from layerzero_xformers.biases import additive, grouped, objects, written_out

_forward = fmha.memory_efficient_attention_forward
_with_lse = fmha.memory_efficient_attention_forward_requires_grad
_with_backward = fmha.memory_efficient_attention
_FLASH = (flash.FwOp, flash.BwOp)
_CUTLASS = (cutlass.FwOp, cutlass.BwOp)
_SPLITK = (triton_splitk.FwOp, None)
_INF = float("inf")


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None, dropout_p: float, is_causal: Any,
    scale: float | None, window: Any, softcap: None, alibi_slopes: None, return_lse: bool,
) -> Any:  # fmt: skip
    """FlashAttention 2, xFormers' build or torch's."""
    bias = None
    if is_causal or window is not None:
        bias = objects(attn_bias, is_causal, window, query.shape[1], key.shape[1])
    return _run(_FLASH, query, key, value, bias, dropout_p, scale, return_lse)


def cutlass_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: Any,
    scale: float | None, window: Any, softcap: None, alibi_slopes: None, return_lse: bool,
) -> Any:  # fmt: skip
    """The CUTLASS kernel: float32 as well, tensor biases, value heads of another size."""
    rows, cols = query.shape[1], key.shape[1]
    bias: Any = None
    if attn_mask is not None:
        bias = additive(attn_mask, written_out(is_causal, window, rows, cols, query), query, cols)
    elif is_causal or window is not None:
        bias = objects(attn_bias, is_causal, window, rows, cols)
    alone = _last_row_alone(rows, cols, attn_mask is not None, is_causal is True)
    return _run(_CUTLASS, query, key, value, bias, dropout_p, scale, return_lse, own_keys=alone)


def splitk_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None, dropout_p: float, is_causal: Any,
    scale: float | None, window: None, softcap: None, alibi_slopes: None, return_lse: bool,
) -> Any:  # fmt: skip
    """Triton's split-K kernel for short queries over long keys; a causal mask says nothing about a single query."""
    return _run(_SPLITK, query, key, value, None, 0.0, scale, return_lse)


def _last_row_alone(rows: int, cols: int, masked: bool, top_left: bool) -> bool:
    """Whether the CUTLASS kernel would go wrong on key heads of stride 0.

    A block of queries that holds a single row is computed over heads instead of rows when all heads share their keys.
    The kernel then steps through a tensor bias by the wrong stride, past its end even, and forgets a top-left diagonal.
    Blocks are 32 or 64 rows.
    """
    return rows % 32 == 1 and (rows > 1 if masked else top_left and rows != cols)


def _run(
    ops: tuple[Any, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    p: float,
    scale: float | None,
    lse: bool,
    own_keys: bool = False,
) -> Any:
    if scale is not None and scale <= 0.0:  # the kernels scale after masking: turn the query instead
        query, scale = upright(query, scale)
    heads, groups = query.shape[2], key.shape[2]
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if heads != groups:
        if needs_grad:
            key, value = _repeated(key, heads), _repeated(value, heads)
        else:
            query, bias = query.unflatten(2, (groups, -1)), grouped(bias, groups)
            key, value = _spread(key, heads // groups), _spread(value, heads // groups)
    if own_keys and key.stride(-2) == 0:
        key = key.contiguous()  # values may stay shared: the kernel looks for both
    if needs_grad:
        out = _with_backward(query, key, value, bias, p, scale, op=ops)
        if not lse:
            return out
        with torch.no_grad():  # its autograd function keeps the log-sum-exp to itself
            return out, _lse_of(_with_lse(query, key, value, bias, 0.0, scale, op=ops[0])[1], query, bias)
    if lse:
        out, sums = _with_lse(query, key, value, bias, 0.0, scale, op=ops[0])
        return out.flatten(2, 3) if query.ndim == 5 else out, _lse_of(sums, query, bias)
    out = _forward(query, key, value, bias, p, scale, op=ops[0])
    return out.flatten(2, 3) if query.ndim == 5 else out


def _spread(kv: Tensor, times: int) -> Tensor:
    return kv.unsqueeze(3).expand(-1, -1, -1, times, -1)


def _repeated(kv: Tensor, heads: int) -> Tensor:
    return _spread(kv, heads // kv.shape[2]).flatten(2, 3)


def _lse_of(sums: Tensor, query: Tensor, bias: Any) -> Tensor:
    """[B, H, Sq] in float32: the CUTLASS kernel pads rows to 32, groups come apart, and a row that sees nothing is
    -inf here, +inf with FlashAttention 2."""
    if sums.ndim == 4:
        sums = sums.flatten(1, 2)
    sums = sums[..., : query.shape[1]].to(torch.float32)
    return sums if bias is None else sums.masked_fill(sums == _INF, -_INF)
