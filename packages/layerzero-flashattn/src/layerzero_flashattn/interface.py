"""Adapters over the functions that FlashAttention 2 and 3 both have, and what version 4 has in common with them.

Causal and window: bottom right, as in all.

Only version 2 knows dropout and ALiBi. Under one and the same version, 3.0.0b1, functions came to return the
log-sum-exp always, then never, then by a flag. So the flag is given where a function takes it, and the result is
looked at.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.model.attention import no_keys, offsets, upright
from layerzero.model.kv_cache import PagedBatch

NO_WINDOW = (-1, -1)

Kernel = Callable[..., Any]


def dense(function: Kernel) -> Kernel:
    """An adapter over `flash_attn_func`, on [B, S, H, D]."""
    ask = _asked(function)

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
        alibi_slopes: Tensor | None,
        return_lse: bool,
        *,
        deterministic: bool = False,
    ) -> Any:
        options: dict[str, Any] = {"deterministic": deterministic}
        if dropout_p or alibi_slopes is not None:
            options.update(dropout_p=dropout_p, alibi_slopes=_float32(alibi_slopes))
        found = ask(query, (key, value), (is_causal, scale, window, softcap), return_lse, **options)
        if return_lse and may_have_dead_rows(query.shape[1], key.shape[1], is_causal, window):
            return found[0], dead_rows(found[1])
        return found

    return attention


def varlen(function: Kernel) -> Kernel:
    """An adapter over `flash_attn_varlen_func`, on packed tokens; the host reads no offset."""
    ask = _asked(function)

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
        alibi_slopes: Tensor | None,
        return_lse: bool,
        *,
        deterministic: bool = False,
    ) -> Any:
        if max_seqlen_k == 0:
            return no_keys(query, value, return_lse)
        options: dict[str, Any] = {"deterministic": deterministic}
        if alibi_slopes is not None:
            options["alibi_slopes"] = _float32(alibi_slopes)
        starts = (cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32))
        inputs = (key, value, *starts, max_seqlen_q, max_seqlen_k)
        found = ask(query, inputs, (is_causal, scale, window, softcap), return_lse, **options)
        # any sequence may be without keys, and that is not known here
        return (found[0], dead_rows(found[1]).transpose(0, 1)) if return_lse else found

    return varlen_attention


def paged(attend: Kernel, *, prefill: bool = False) -> Kernel:
    """An adapter over `attend(query, key_cache, value_cache, batch, return_lse, **options)`.

    For one new token a sequence, whose lengths and page numbers stay on the device; with `prefill` for any number.
    """

    def paged_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        scale: float | None,
        window: tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        return_lse: bool,
        layout: str,
    ) -> Any:
        if scale is not None and scale <= 0.0:
            query, scale = upright(query, scale)
        options: dict[str, Any] = {} if alibi_slopes is None else {"alibi_slopes": _float32(alibi_slopes)}
        options.update(softmax_scale=scale, causal=True, window_size=window or NO_WINDOW, softcap=softcap or 0.0)
        query = query if prefill else query.unsqueeze(1)
        found = attend(query, key_cache, value_cache, batch, return_lse, **options)
        if prefill:
            return (found[0], dead_rows(found[1]).transpose(0, 1)) if return_lse else found
        return (found[0].squeeze(1), found[1].squeeze(-1)) if return_lse else found.squeeze(1)

    return paged_attention


def sides(window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """A window in FlashAttention 4's words, where an unlimited side is None."""
    if window is None:
        return None, None
    left, right = window
    return (None if left < 0 else left), (None if right < 0 else right)


def may_have_dead_rows(query_len: int, key_len: int, is_causal: bool | str, window: tuple[int, int] | None) -> bool:
    """Whether some query row can be left without any key; its log-sum-exp is then not always written as -inf."""
    return window is not None or (bool(is_causal) and query_len > key_len)


def dead_rows(lse: Tensor) -> Tensor:
    """-inf where a kernel wrote +inf as the log-sum-exp of a row that attends nothing."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def packed_offsets(batch: PagedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sequence's queries and keys begin, int32 [B + 1] each, from the lengths the host knows."""
    found = list(offsets(batch.query_lens_host, batch.context_lens_host))
    if device.type == "cuda":
        found = [item.pin_memory() for item in found]  # only a copy from pinned memory does not wait
    first, second = (item.to(device, non_blocking=True) for item in found)
    return first, second


def _float32(slopes: Tensor | None) -> Tensor | None:
    """ALiBi slopes as the library takes them, with a contiguous last axis."""
    return None if slopes is None else slopes.to(torch.float32).contiguous()


def _asked(function: Kernel) -> Kernel:
    """A call of the function in its own words; its log-sum-exp is asked for in the way this build knows."""
    with_lse = function
    if "return_attn_probs" in inspect.signature(function).parameters:
        with_lse = functools.partial(function, return_attn_probs=True)

    def ask(query: Tensor, rest: tuple[Any, ...], asked: tuple[Any, ...], return_lse: bool, **options: Any) -> Any:
        is_causal, scale, window, softcap = asked
        if scale is not None and scale <= 0.0:
            query, scale = upright(query, scale)
        options.update(causal=bool(is_causal), window_size=window or NO_WINDOW, softcap=softcap or 0.0)
        found = (with_lse if return_lse else function)(query, *rest, softmax_scale=scale, **options)
        if return_lse:
            return _pair(found)
        return found[0] if type(found) is tuple else found

    return ask


def _pair(found: Any) -> tuple[Tensor, Tensor]:
    """(out, lse), which some builds cannot give."""
    if not isinstance(found, tuple):
        raise RuntimeError(
            "this build of flash_attn_interface returns no log-sum-exp; "
            "build flash-attention/hopper as of 2025-08-29 or later"
        )
    return found[0], found[1]
