"""Attention of several sequences of one length (batch > 1), without copying keys or values.

[B, S, Hkv, D] is a paged cache of B pages of S tokens, whatever its strides; where it has no gaps it is also B packed
sequences, which is what the prefill kernels read fastest. A plan depends on shapes alone and is kept by them, so the
layers of a model share one, and a decode loop makes one a step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero_flashinfer.options import behind, options
from layerzero_flashinfer.plans import Lengths, Plan, Problem, problem_of, refuse_planning
from layerzero_flashinfer.workspace import place

_KEPT = 16  # plans; each holds a wrapper of some 16 MiB

_plans: OrderedDict[Any, Plan] = OrderedDict()
_guard = threading.Lock()


def _planned(key: Any, problem: Problem, query: Tensor, cols: int, where: tuple[int, int]) -> Plan:
    batch, rows = query.shape[:2]
    refuse_planning(f"no plan for [{batch}, {rows}, {cols}] yet")
    made = Plan(problem, where, query.device, _lengths(problem.kind, batch, rows, cols, query.device))
    with _guard:
        found = _plans.setdefault(key, made)
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


def _kernel(template: str) -> Callable[..., Any]:
    """The kernel of one wrapper and template."""

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
        rows, cols = query.shape[1], key.shape[1]
        if rows > cols and (is_causal or (window is not None and window[1] == 0)):  # it has wrong rows then
            seen = query[:, rows - cols :]
            live = attend(seen, key, value, None, 0.0, is_causal, scale, window, softcap, None, return_lse)
            return behind(live, rows - cols)
        kind, pages = template, (key, value)
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
            problem = problem_of(kind, query, key, 1 if kind[0] == "r" else cols, asked)
            found = _planned(known, problem, query, cols, where)
        batch, rows = query.shape[:2]
        result = found.run(query.flatten(0, 1), *pages, return_lse)
        if not return_lse:
            return result.unflatten(0, (batch, rows))
        out, lse = result
        return out.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows)).transpose(1, 2)

    return attend


decode = _kernel("decode")  # one query a sequence, on CUDA cores
decode_tc = _kernel("decode_tc")  # on tensor cores
prefill_fa2 = _kernel("paged_fa2")  # any number of queries
prefill_fa3 = _kernel("paged_fa3")  # Hopper's template
