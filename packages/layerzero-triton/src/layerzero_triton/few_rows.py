"""`linear` of one row and gated `mlp` of a few, as decode steps have them. Canonical arguments."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from layerzero_triton.config import few_rows_config, next_power, unit_of
from layerzero_triton.kernels import few_rows as device
from layerzero_triton.kernels.launch import Launcher, Plan, assembling, collecting, prepare, remember
from layerzero_triton.linear import _rows, coded

_single = Launcher(device.single)
_several = Launcher(device.several)
_plans: dict[Any, Plan] = {}
_known: set[Any] = set()


def linear(x: Tensor, weight: Any, bias: Tensor | None, activation: str | None) -> Tensor:
    """x [..., K], one row, times weight [N, K] transposed, plain or in codes of four bits, bias and activation."""
    n, k = weight.shape
    scale, four, per = None, "none", 0
    if not isinstance(weight, Tensor):
        weight, scale, four, per = coded(weight)
    weight = _rows(weight)
    out = x.new_empty((*x.shape[:-1], n))
    # Everything a plan is made of, and every dtype.
    key = (n, k, weight.stride(0), x.dtype, x.get_device(), None if bias is None else bias.dtype, activation, four, per)
    plan = _plans.get(key)
    if plan is None:
        plan = _of_one(n, k, weight.stride(0), bias is not None, activation or "none", False, four, per)
        remember(_plans, key, plan)
    _single.go(plan, (x.contiguous(), weight, scale, bias, out))
    return out


def mlp(x: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: None, activation: str, *biases: None) -> Tensor:
    """act(x @ gate.T) * (x @ up.T) in one launch, from one weight with the gate first, and the projection back."""
    inner = _gated(x, up_weight, activation)
    return linear(inner, down_weight, None, None) if inner.numel() == inner.shape[-1] else F.linear(inner, down_weight)


def _gated(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    n, k = weight.shape[0] // 2, weight.shape[1]
    rows, weight = _rows(x.reshape(-1, k)), _rows(weight)
    m, steps = rows.shape[0], (rows.stride(0), weight.stride(0))
    out = x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return out
    key = (m, n, k, steps, x.dtype, x.get_device(), kind)
    plan = _plans.get(key)
    if plan is None:
        _prepared(x, weight, kind)
        made = _of_one(n, k, steps[1], False, kind, True, "none", 0) if m == 1 else _of_several(m, n, k, steps, kind)
        plan = remember(_plans, key, made)
    if m == 1:
        _single.go(plan, (rows, weight, None, None, out))
    else:
        _several.go(plan, (rows, weight, out))
    return out


def _of_one(n: int, k: int, step: int, biased: bool, kind: str, gated: bool, four: str, per: int) -> Plan:
    block_n, block_k, warps, stages = few_rows_config(1, k, gated)
    if four != "none":  # 16 bytes a thread and row, so that eight rows share what is made of x
        block_n, block_k = 8, min(4096, k & -k)
    unit, even = unit_of(k, step), n % block_n == 0 and k % block_k == 0
    constants = (block_n, block_k, even, unit, biased, gated, kind, four, per, assembling())
    return Plan((-(-n // block_n), 1, 1), (n, k // unit, step // unit), constants, warps, stages)


def _of_several(m: int, n: int, k: int, steps: tuple[int, int], kind: str) -> Plan:
    block_n, block_k, warps, stages = few_rows_config(m, k, True)
    unit, even = unit_of(k, *steps), n % block_n == 0 and k % block_k == 0
    constants = (max(16, next_power(m)), block_n, block_k, even, unit, kind)
    numbers = (m, n, *(size // unit for size in (k, *steps)))
    return Plan((-(-n // block_n), 1, 1), numbers, constants, warps, stages)


def _prepared(x: Tensor, weight: Tensor, kind: str) -> None:
    """Compile what other numbers of rows need, once for a weight's shape."""
    key = (weight.shape, x.dtype, x.get_device(), kind)
    if key in _known or x.is_cpu:
        return
    _known.add(key)
    with collecting() as launches:
        for rows in (1, 16, 32):
            _gated(x.new_empty((rows, weight.shape[1])), weight, kind)
    prepare(launches, x.device)
