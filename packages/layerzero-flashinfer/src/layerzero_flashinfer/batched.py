"""Attention of several sequences of one length (batch > 1), without copying keys or values.

[B, S, Hkv, D] is a paged cache of B pages of S tokens, whatever its strides; where it has no gaps it is also B packed
sequences, which is what the prefill kernels read fastest. A plan depends on shapes alone and is kept by them, so the
layers of a model share one, and a decode loop makes one a step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from layerzero_flashinfer.options import Options, behind, options
from layerzero_flashinfer.plans import Lengths, Plan, Problem, plan, refuse_planning
from layerzero_flashinfer.workspace import place

__all__ = ["decode", "decode_tc", "prefill_fa2", "prefill_fa3"]

_KEPT = 16  # plans; each holds a wrapper of some 16 MiB

_plans: OrderedDict[Any, tuple[Plan, float]] = OrderedDict()  # and how the query is turned first
_guard = threading.Lock()


def _planned(key: Any, kind: str, query: Tensor, cache: Tensor, asked: Options, where: tuple[int, int]) -> Any:
    batch, rows, heads, width = query.shape
    cols, kv_heads = cache.shape[1:3]
    refuse_planning(f"no plan for [{batch}, {rows}, {cols}] yet")
    page = 1 if kind[0] == "r" else cols
    problem = Problem(
        kind, heads, kv_heads, width, page, query.dtype, cache.dtype, "NHD", asked.causal and kind[0] != "d",
        asked.window, asked.softcap, asked.scale,
    )  # fmt: skip
    made = plan(problem, where, query.device, _lengths(kind, batch, rows, cols, query.device))
    with _guard:
        found = _plans.setdefault(key, (made, asked.turned))
        while len(_plans) > _KEPT:
            _plans.popitem(last=False)
    return found


def _lengths(kind: str, batch: int, rows: int, cols: int, device: torch.device) -> Lengths:
    queries, contexts = (rows,) * batch, (cols,) * batch
    steps = torch.arange(batch + 1, dtype=torch.int32)
    if kind[0] == "r":
        return Lengths(queries, contexts, steps * cols, None, None)
    pages = torch.arange(batch, dtype=torch.int32, device=device)
    return Lengths(queries, contexts, steps, pages, torch.full((batch,), cols, dtype=torch.int32))


def _attend(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool | str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    return_lse: bool,
) -> Any:
    rows, cols = query.shape[1], key.shape[1]
    if rows > cols and (is_causal or (window is not None and window[1] == 0)):  # it has wrong rows then
        live = _attend(kind, query[:, rows - cols :], key, value, is_causal, scale, window, softcap, return_lse)
        return behind(live, rows - cols)
    pages = (key, value)
    if kind[0] == "p" and key.is_contiguous() and value.is_contiguous():
        kind = "ragged" + kind[5:]
        pages = (key.flatten(0, 1), value.flatten(0, 1))
    elif key.stride() != value.stride():  # the kernels read both with one set of strides
        pages = (key.contiguous(), value.contiguous())
    where = place(query)
    known = (kind, query.shape, key.shape, query.dtype, is_causal, scale, window, softcap, where)
    found = _plans.get(known)
    if found is None:
        asked = options(is_causal, window, softcap, scale, query.shape[-1])
        found = _planned(known, kind, query, key, asked, where)
    planned, turned = found
    if turned != 1.0:
        query = query * turned
    batch, rows = query.shape[:2]
    result = planned.run(query.flatten(0, 1), *pages, return_lse)
    if not return_lse:
        return result.unflatten(0, (batch, rows))
    out, lse = result
    return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows)).transpose(1, 2)


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
    """One query a sequence, on CUDA cores."""
    return _attend("decode", query, key, value, is_causal, scale, window, softcap, return_lse)


def decode_tc(
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
    """One query a sequence, on tensor cores."""
    return _attend("decode_tc", query, key, value, is_causal, scale, window, softcap, return_lse)


def prefill_fa2(
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
    """Any number of queries, on the FA2 template."""
    return _attend("paged_fa2", query, key, value, is_causal, scale, window, softcap, return_lse)


def prefill_fa3(
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
    """Any number of queries, on Hopper's FA3 template."""
    return _attend("paged_fa3", query, key, value, is_causal, scale, window, softcap, return_lse)
