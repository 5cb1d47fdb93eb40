"""Attention of one sequence (batch 1): prefill on the FA2 and FA3 templates, decode with and without tensor cores.

Through the function FlashInfer's public call ends in, because that one takes the scratch memory: the public call shares
one buffer between all streams of a device. A release in which that function has changed is called by its public door.
All inputs are [1, S, H, D], read as they lie: no copy for a transposed view or a slice of a longer cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layerzero_flashinfer.options import LN2, Options, behind, options
from layerzero_flashinfer.vendor import lib, starts_with
from layerzero_flashinfer.workspace import place, workspace

_NHD, _HND = 0, 1  # FlashInfer's numbers for the two orders of a cache
_PREFILL = (
    "q", "k", "v", "tmp", "o", "maybe_lse", "mask_mode", "layout", "window_left", "maybe_packed_custom_mask",
    "maybe_alibi_slopes", "logits_soft_cap", "sm_scale", "scale_q", "scale_k", "scale_v", "rope_scale", "rope_theta",
)  # fmt: skip
_DECODE = (
    "q", "k", "v", "tmp", "o", "maybe_lse", "alibi_slopes", "kv_layout_code", "window_left", "logits_soft_cap",
    "sm_scale", "rope_scale", "rope_theta",
)  # fmt: skip

# What calls with the same options share, so that a call looks up one thing: the module's function and the options.
_calls: dict[tuple[Any, ...], tuple[Callable[..., Any] | None, Options]] = {}
_MOST = 4096  # a scale that changes from call to call must not fill the memory


@cache
def _run(kind: str, dtype: torch.dtype, width: int, window: bool, softcap: bool) -> Callable[..., Any] | None:
    """The function of one compiled module, for decode or a template of prefill; None: only the public door is known."""
    sizes = (dtype, dtype, dtype, width, width, 0, window, softcap)
    if kind == "decode":
        run = lib().decode.get_single_decode_module(*sizes).run
    else:
        run = lib().prefill.get_single_prefill_module(kind, *sizes, False).run
    return run if starts_with(run, _DECODE if kind == "decode" else _PREFILL) else None


def _bind(known: tuple[Any, ...]) -> tuple[Callable[..., Any] | None, Options]:
    """The function and the options of calls like this one, kept for the next."""
    kind, dtype, width, causal, scale, window, softcap = known
    asked = options(causal, window, softcap, scale, width)
    run = _run(kind, dtype, width, asked.window >= 0, asked.softcap > 0.0)
    if len(_calls) >= _MOST:
        _calls.clear()
    found = _calls[known] = (run, asked)
    return found


def _prefill(backend: str, *, one_query: bool = False) -> Callable[..., Any]:
    """The kernel of one template."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any,
        dropout_p: float,
        is_causal: bool | str,
        scale: float | None,
        window: tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: Any,
        return_lse: bool,
    ) -> Any:
        if one_query:  # a causal mask hides nothing then; without it the kernel may split the keys
            is_causal = False
        shape = query.shape
        known = (backend, query.dtype, shape[3], is_causal, scale, window, softcap)
        run, asked = _calls.get(known) or _bind(known)
        rows, cols = shape[1], key.shape[1]
        if asked.causal and rows > cols:  # it refuses rows without a key
            seen = query[:, rows - cols :]
            live = attend(seen, key, value, None, 0.0, is_causal, scale, window, softcap, None, return_lse)
            return behind(live, rows - cols)
        if asked.turned != 1.0:
            query = query * asked.turned
        q, k, v = query[0], key[0], value[0]
        if run is None:
            more = {"causal": asked.causal, "kv_layout": "NHD", "backend": backend}
            out, lse = _publicly(lib().single_prefill_with_kv_cache, q, k, v, asked, return_lse, **more)
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)  # half the price of naming size and device
            lse = torch.empty((rows, shape[2]), dtype=torch.float32, device=query.device) if return_lse else None
            scratch = workspace(place(query), query.device)
            with scratch.lock:
                run(
                    q, k, v, scratch.single, out, lse, int(asked.causal), _NHD, asked.window, None, None,
                    asked.softcap, asked.scale, None, None, None, 1.0, 1e4,
                )  # fmt: skip
        if lse is None:
            return out[None]
        return out[None], lse.mul_(LN2).transpose(0, 1)[None]

    return attend


prefill_fa2 = _prefill("fa2")  # for every SM from 7.5
prefill_fa3 = _prefill("fa3")  # Hopper's wgmma and TMA, hence 16-byte strides
decode_tc = _prefill("fa2", one_query=True)  # on tensor cores: the heads of a GQA group are rows of one tile


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    """One query on CUDA cores: reads the cache once for each query head of a group."""
    known = ("decode", query.dtype, query.shape[3], False, scale, window, softcap)
    run, asked = _calls.get(known) or _bind(known)
    if asked.turned != 1.0:
        query = query * asked.turned
    q, k, v = query[0, 0].contiguous(), key[0], value[0]
    order, (k, v) = _packed(k, v)
    if run is None:
        more = {"kv_layout": "NHD" if order == _NHD else "HND", "use_tensor_cores": False}
        out, lse = _publicly(lib().single_decode_with_kv_cache, q, k, v, asked, return_lse, **more)
    else:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], dtype=torch.float32, device=q.device) if return_lse else None
        scratch = workspace(place(query), query.device)
        with scratch.lock:
            run(
                q, k, v, scratch.single, out, lse, None, order, asked.window, asked.softcap, asked.scale, 1.0, 1e4
            )  # fmt: skip
    out = out.view(1, 1, *out.shape)
    return out if lse is None else (out, lse.mul_(LN2).view(1, -1, 1))


def _packed(key: Tensor, value: Tensor) -> tuple[int, tuple[Tensor, Tensor]]:
    """[S, H, D] as the kernel reads it: either order without gaps; anything else is copied."""
    if key.is_contiguous() and value.is_contiguous():
        return _NHD, (key, value)
    turned = key.transpose(0, 1), value.transpose(0, 1)
    if turned[0].is_contiguous() and turned[1].is_contiguous():
        return _HND, turned
    return _NHD, (key.contiguous(), value.contiguous())


def _publicly(door: Any, q: Tensor, k: Tensor, v: Tensor, asked: Options, return_lse: bool, **more: Any) -> Any:
    """By a public door of FlashInfer's; `more` is what only this one takes."""
    found = door(
        q, k, v, **more, pos_encoding_mode="NONE", window_left=asked.window, logits_soft_cap=asked.softcap,
        sm_scale=asked.scale, return_lse=return_lse,
    )  # fmt: skip
    return found if return_lse else (found, None)
