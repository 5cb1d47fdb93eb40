"""Adapters over `flash_attn_interface`, the library of FlashAttention 3. Causal and window: bottom right.

Under one and the same version, 3.0.0b1, its functions came to return the log-sum-exp always, then never, then by a
flag. So the flag is given where the function takes it, and the result is looked at.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.kv_cache import PagedBatch
from layerzero.model.variants import GradientVariant
from layerzero_flashattn.shared import NO_WINDOW, dead_rows, may_have_dead_rows, no_keys, packed_offsets, upright

__all__ = [
    "attention",
    "deterministic_attention",
    "deterministic_varlen_attention",
    "paged_decode",
    "paged_prefill",
    "varlen_attention",
]

_library: Any = importlib.import_module("flash_attn_interface")


def _with_lse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, asked for its log-sum-exp in the way this build knows."""
    if "return_attn_probs" in inspect.signature(function).parameters:
        return functools.partial(function, return_attn_probs=True)
    return function


def _pair(found: Any) -> tuple[Tensor, Tensor]:
    """(out, lse), which some builds cannot give."""
    if not isinstance(found, tuple):
        raise RuntimeError(
            "this build of flash_attn_interface returns no log-sum-exp; "
            "build flash-attention/hopper as of 2025-08-29 or later"
        )
    return found[0], found[1]


_func = _library.flash_attn_func
_varlen_func = _library.flash_attn_varlen_func
_func_lse = _with_lse(_func)
_varlen_func_lse = _with_lse(_varlen_func)
_with_kvcache = _library.flash_attn_with_kvcache


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    *,
    deterministic: bool = False,
) -> Any:
    """`flash_attn_func` on [B, S, H, D]."""
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    found = (_func_lse if return_lse else _func)(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=bool(is_causal),
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        deterministic=deterministic,
    )
    if not return_lse:
        return found[0] if isinstance(found, tuple) else found
    out, lse = _pair(found)
    dead = may_have_dead_rows(query.shape[1], key.shape[1], is_causal, window)
    return out, dead_rows(lse) if dead else lse


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    *,
    deterministic: bool = False,
) -> Any:
    """`flash_attn_varlen_func` on packed tokens; the host reads no offset."""
    if max_seqlen_k == 0:
        return no_keys(query, value, return_lse)
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    found = (_varlen_func_lse if return_lse else _varlen_func)(
        query,
        key,
        value,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=scale,
        causal=bool(is_causal),
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        deterministic=deterministic,
    )
    if not return_lse:
        return found[0] if isinstance(found, tuple) else found
    out, lse = _pair(found)
    return out, dead_rows(lse).transpose(0, 1)


deterministic_attention = GradientVariant(attention, deterministic=True)
deterministic_varlen_attention = GradientVariant(varlen_attention, deterministic=True)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_with_kvcache` for one new token a sequence; lengths and page numbers stay on the device."""
    found = _cached(query.unsqueeze(1), key_cache, value_cache, batch, scale, window, softcap, return_lse)
    return (found[0].squeeze(1), found[1].squeeze(-1)) if return_lse else found.squeeze(1)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: None,
    return_lse: bool,
    layout: str,
) -> Any:
    """`flash_attn_with_kvcache` over packed queries, for any number of new tokens a sequence."""
    cu_seqlens_q, _ = packed_offsets(batch, query.device)
    packed = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": batch.max_query_len}
    found = _cached(query, key_cache, value_cache, batch, scale, window, softcap, return_lse, **packed)
    return (found[0], dead_rows(found[1]).transpose(0, 1)) if return_lse else found


def _cached(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    return_lse: bool,
    **packed: Any,
) -> Any:
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    return _with_kvcache(
        query,
        key_cache,
        value_cache,
        cache_seqlens=batch.context_lens.to(torch.int32),
        page_table=batch.block_tables.to(torch.int32),
        softmax_scale=scale,
        causal=True,
        window_size=window or NO_WINDOW,
        softcap=softcap or 0.0,
        return_softmax_lse=return_lse,
        **packed,
    )
