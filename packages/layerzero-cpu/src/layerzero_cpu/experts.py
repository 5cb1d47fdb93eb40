"""Experts by our own kernels: tokens sorted by expert, the gate applied to the sums, results added up in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero_cpu.library import native
from layerzero_cpu.linear import ACTIVATIONS

_KINDS = {**ACTIVATIONS, "swigluoai": len(ACTIVATIONS)}


def moe(x: Tensor, gate_up: Any, down: Any, *routed: Any, fixed: bool = False) -> Tensor:
    """The weighted sum of each token's experts, rounded once; weights are plain, or INT8 or INT4 codes."""
    shares, ids, activation, offset, up_bias, down_bias, alpha, limit, interleaved = routed
    out = x.new_empty((x.shape[0], down.shape[1]))
    rest = [shares.float() if shares.dtype is torch.float64 else shares, ids, up_bias, down_bias, out]
    rest += [_KINDS[activation], offset, alpha, math.inf if limit is None else limit, interleaved]
    run, weights = native.moe, [gate_up, down]
    if isinstance(gate_up, Tensor):
        rest.append(fixed)
    else:
        run, weights, sources = native.moe_quantized, [], [getattr(item, "source", item) for item in (gate_up, down)]
        for source in sources:
            point = source.zero_point
            weights += [source.data, source.scale, None if point is None else point.to(torch.int32)]
        rest += [8 if sources[0].fmt is QuantFormat.INT8 else 4, *(source.block_size or 0 for source in sources)]
    if run(x, *weights, *rest) is False:
        run(x.contiguous(), *(None if item is None else item.contiguous() for item in weights), *rest)
    return out


def fixed(*call: Any) -> Tensor:
    """The same, computed in one way for any number of rows: the bits of a token depend on nothing else in the call."""
    return moe(*call, fixed=True)


def fixed_mlp(
    x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str, *biases: Tensor | None
) -> Tensor:
    """The feed-forward block as an expert that has every row."""
    up_bias, gate_bias, down_bias = biases
    if gate is not None:
        if up_bias is not None or gate_bias is not None:
            none = up.new_zeros(up.shape[0])
            up_bias = torch.cat([none if item is None else item for item in (gate_bias, up_bias)])
        up = torch.cat([gate, up])
    rows = x.reshape(-1, x.shape[-1])
    routed = torch.ones((rows.shape[0], 1)), torch.zeros((rows.shape[0], 1), dtype=torch.int64)
    first, last = (None if item is None else item[None] for item in (up_bias, down_bias))
    out = fixed(rows, up[None], down[None], *routed, activation, 0, first, last, 1.0, None, False)
    return out.view(*x.shape[:-1], down.shape[0])
