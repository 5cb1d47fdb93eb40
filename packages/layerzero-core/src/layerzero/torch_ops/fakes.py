"""Shapes, dtypes and strides of each opaque op's result, from shapes alone: FakeTensor, Meta, export.

They mirror `calls`, argument for argument. Nothing is checked here beyond what a shape needs: a call that means
nothing is refused by the public function, with its reason, when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.model.folding import folding_of, is_folded
from layerzero.torch_ops.calls import heads_inside, scheme_of

__all__: list[str] = []


def _dense(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(shape, dtype=like.dtype if dtype is None else dtype)


def _ordered(like: Tensor, last: Any) -> Tensor:
    """A tensor shaped like `like` but for its last axis, in its memory order."""
    if heads_inside(like):
        batch, one, two, _ = like.shape
        return _dense(like, batch, two, one, last).transpose(1, 2)
    return _dense(like, *like.shape[:-1], last)


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Like the query, as wide as the value; where leading axes broadcast, as they do."""
    # The overload `call` has no layout among its arguments: a graph folds before it calls.
    if not is_folded(query, key, value, rest[3] if len(rest) > 3 else ""):
        return _ordered(query, value.shape[-1])
    return _dense(query, *_result_axes(query, key, value), query.shape[-2], value.shape[-1])


def _result_axes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    how = folding_of(query, key, value)
    return (*how.lead, how.heads) if how.rank > 2 else ()


def attention_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, causal: str, scale: Any, layout: str, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is [B, H, Sq] whatever the layout; [B, Sq] for 3-D inputs."""
    if is_folded(query, key, value, layout):
        out = attention(query, key, value, attn_mask, causal, scale, layout)
        return out, _dense(query, *out.shape[:-1], dtype=torch.float32)
    shape = list(query.shape[:-1])
    if len(shape) == 3 and layout == "BSHD":
        shape = [shape[0], shape[2], shape[1]]
    return _ordered(query, value.shape[-1]), _dense(query, *shape, dtype=torch.float32)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> Tensor:
    """[tokens, Hq, Dv]."""
    return _dense(query, query.shape[0], query.shape[1], value_cache.shape[-1])


def paged_attention_lse(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is [tokens, Hq]."""
    out = paged_attention(query, key_cache, value_cache)
    return out, _dense(query, query.shape[0], query.shape[1], dtype=torch.float32)


def same(x: Tensor, *rest: Any) -> Tensor:
    """Shaped like the first argument."""
    return _dense(x, *x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shaped like both."""
    return same(x), same(residual)


def rope(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Like q and k."""
    return _ordered(q, q.shape[-1]), _ordered(k, k.shape[-1])


def rope_query(q: Tensor, *rest: Any) -> Tensor:
    """Like q."""
    return _ordered(q, q.shape[-1])


def gated(x: Tensor, *rest: Any) -> Tensor:
    """Half as wide."""
    return _dense(x, *x.shape[:-1], x.shape[-1] // 2)


def linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """As wide as the weight has rows."""
    return _dense(x, *x.shape[:-1], weight.shape[0])


def embedding(ids: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """One row of the table for each id."""
    return _dense(weight, *ids.shape, weight.shape[1])


def ids(logits: Tensor, *rest: Any) -> Tensor:
    """One id a row."""
    return _dense(logits, logits.shape[0], dtype=torch.int64)


def quantize(
    x: Tensor, fmt: str, granularity: str, block_size: Any, asymmetric: bool | None, backend: Any
) -> list[Tensor]:
    """Codes, scales, the zero points of an asymmetric scheme, and for NVFP4 the tensor scale."""
    scheme = scheme_of(fmt, granularity, block_size, asymmetric)
    traits, block = scheme.traits, scheme.block_size
    width = x.shape[-1]
    data = _dense(x, *x.shape[:-1], width // 2 if traits.packed else width, dtype=getattr(torch, traits.data_dtype))
    scales: tuple[Any, ...] = ()
    if scheme.granularity != "tensor":
        scales = (*x.shape[:-1], 1 if block is None else width // block)
    parts = [data, _dense(x, *scales, dtype=getattr(torch, traits.scale_dtype))]
    if not scheme.symmetric:
        parts.append(_dense(x, *scales, dtype=torch.int32))
    return parts + ([_dense(x, dtype=torch.float32)] if traits.tensor_scale else [])


def dequantize(
    data: Tensor,
    scale: Tensor,
    zero_point: Any,
    tensor_scale: Any,
    fmt: str,
    granularity: str,
    block_size: Any,
    shape: Sequence[Any],
    dtype: torch.dtype,
    backend: Any,
) -> Tensor:
    """The shape and dtype that were asked for."""
    return _dense(data, *shape, dtype=dtype)
