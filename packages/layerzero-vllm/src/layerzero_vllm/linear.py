"""Linears of a CPU: ours for the numbers of rows at which it was quicker when the weights were loaded, else vLLM's.

vLLM packs the weight of an unquantized linear once (`dispatch_cpu_unquantized_gemm`) and calls what that function left
in `layer.cpu_linear`. Where ours wins for some numbers of rows the plain weight is kept beside the packed one; where it
wins for all the packed one is dropped. Both hide behind one torch op, so that a compiled graph holds either.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero_vllm.attend import race
from layerzero_vllm.choice import OURS, THEIRS, rows_won
from layerzero_vllm.plugin import pinned

ROWS = (1, 8, 32, 128)  # rows that are measured: decode of one and of a few sequences, a batch, a prompt
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Entry(NamedTuple):
    """Two ways to one product. Rows in between count as the next number in ROWS, more than that as the last one."""

    theirs: Linear | None
    ours: tuple[bool, ...]


_entries: dict[int, Entry] = {}  # by the address of the plain weight, which lives as long as its layer
_library: Any = torch.library.Library("layerzero_vllm", "DEF")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    entry = _entries[weight.data_ptr()]
    if entry.theirs is None or entry.ours[min(bisect_left(ROWS, x.numel() // x.shape[-1]), len(ROWS) - 1)]:
        return lz.linear(x, weight, bias)
    return entry.theirs(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("linear", _linear, "CPU")
torch.library.register_fake("layerzero_vllm::linear", _fake, lib=_library)


def measure(weight: Tensor, theirs: Linear) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
    """Microseconds of both, and the kernel of ours, by rows; nothing where the results disagree."""
    times, kernels = {}, {}
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        ways = {OURS: functools.partial(lz.linear, x, weight), THEIRS: functools.partial(theirs, x, weight, None)}
        ours, other = (way().float() for way in ways.values())
        limit = (1e-4 if weight.dtype is torch.float32 else 2e-2) * float(other.abs().max())
        if not bool(torch.isfinite(ours).all()) or float((ours - other).abs().max()) > limit:
            return {}, {}
        times[rows], kernels[rows] = race(ways, seconds=0.05), lz.which("linear", x, weight)
    return times, kernels


def dispatching(stock: Callable[..., None], choose: Callable[[Tensor, Linear], frozenset[int]]) -> Callable[..., None]:
    """vLLM's `dispatch_cpu_unquantized_gemm`; after it `choose(weight, theirs)` says for which of ROWS ours runs."""

    @functools.wraps(stock)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight, bias = layer.weight, getattr(layer, "bias", None)
        stock(layer, remove_weight)
        plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_cpu and weight.dtype in _DTYPES
        if not plain or not weight.is_contiguous() or (bias is not None and bias.dtype is not weight.dtype):
            return
        theirs = layer.cpu_linear
        won = choose(weight.detach(), theirs)
        if not won:
            return
        ours = tuple(rows in won for rows in ROWS)
        layer.weight = weight
        _entries[weight.data_ptr()] = Entry(None if all(ours) else theirs, ours)
        layer.cpu_linear = torch.ops.layerzero_vllm.linear

    return dispatch


def install() -> None:
    """Have vLLM's linears chosen when their weights are packed; once a process."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    from layerzero_vllm.worker import agreed, report

    stock = utils.dispatch_cpu_unquantized_gemm
    if getattr(stock, "__wrapped__", None) is not None:
        return
    known: dict[tuple[Any, ...], frozenset[int]] = {}
    forced = {OURS: frozenset(ROWS), THEIRS: frozenset[int]()}

    def choose(weight: Tensor, theirs: Linear) -> frozenset[int]:
        kind = (*weight.shape, weight.dtype)
        if kind not in known:
            times, kernels = agreed(lambda: measure(weight, theirs))
            side = pinned(os.environ)
            known[kind] = frozenset() if not times else rows_won(times) if side is None else forced[side]
            report().linears.extend(_told(weight, times, kernels, known[kind]))
            config = get_current_vllm_config_or_none()
            if config is not None and isinstance(config.additional_config, dict):  # part of the key of compiled graphs
                config.additional_config["layerzero_vllm"] = sorted(f"{one}: {bool(won)}" for one, won in known.items())
        return known[kind]

    utils.dispatch_cpu_unquantized_gemm = dispatching(stock, choose)


def _told(
    weight: Tensor, times: dict[int, dict[str, float]], kernels: dict[int, str], won: frozenset[int]
) -> list[dict[str, Any]]:
    dtype = str(weight.dtype).removeprefix("torch.")
    kind = f"linear {weight.shape[1]} to {weight.shape[0]}, {dtype}"
    if not times:
        reason = "the two disagree on a drawn input"
        return [{"kind": kind, "phase": "all", "winner": THEIRS, "reason": reason, "kernel": "vLLM's own", "times": {}}]
    return [
        {
            "kind": kind,
            "phase": f"{rows} rows",
            "winner": OURS if rows in won else THEIRS,
            "reason": f"{timed[THEIRS] / timed[OURS]:.2f}x as quick as vLLM's",
            "kernel": kernels[rows] if rows in won else "vLLM's own",
            "times": timed,
        }
        for rows, timed in times.items()
    ]
