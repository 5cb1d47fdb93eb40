"""Linear layers by our own kernels: weights are read as they lie, plain or quantized; nothing is packed beforehand.

What is called `fixed` takes one way through the products for any number of rows: the bits of a row do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.model.enums import QuantFormat
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import QuantizedTensor
from layerzero_cpu.gated import gelu_and_mul, relu_and_mul, silu_and_mul
from layerzero_cpu.library import adapted, native

__all__ = ["fixed", "fixed_mlp", "fixed_moe", "linear", "quantized"]

_ACTIVATIONS = {None: 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}
_linear = native.linear
_quantized = native.linear_quantized


@adapted
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(x @ weight.T + bias), summed in float32."""
    return _multiplied(_linear, x, weight, bias, activation)


def _multiplied(run: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if run(x, weight, bias, out, _ACTIVATIONS[activation]) is False:
        run(x.contiguous(), weight.contiguous(), bias, out, _ACTIVATIONS[activation])
    return out


def fixed(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same, computed in one way for any number of rows."""
    return _multiplied(native.linear_fixed, x, weight, bias, activation)


def fixed_mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The feed-forward block in float32 from end to end, rounded once."""
    dtype, given = x.dtype, (x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias)
    wide: Any = [None if item is None else item.float() for item in given]
    x, up_weight, down_weight, gate_weight, up_bias, gate_bias, down_bias = wide
    if gate_weight is not None:
        gate = fixed(x, gate_weight, gate_bias, None)
        inner = _gated(torch.cat([gate, fixed(x, up_weight, up_bias, None)], dim=-1), activation)
    elif up_weight.shape[0] == down_weight.shape[1]:
        inner = fixed(x, up_weight, up_bias, activation)
    else:
        inner = _gated(fixed(x, up_weight, up_bias, None), activation)
    return fixed(inner, down_weight, down_bias, None).to(dtype)


def _gated(x: Tensor, activation: str) -> Tensor:
    """The activation of the first half of x times the second."""
    if activation in ("silu", "relu"):
        return (silu_and_mul if activation == "silu" else relu_and_mul)(x)
    return gelu_and_mul(x, "tanh" if activation == "gelu_tanh" else "none")


def fixed_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_offset: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Expert by expert in float32, and the results of a token added up in the order of its slots."""
    tokens, top_k = topk_ids.shape
    slots = topk_ids.flatten() - expert_offset
    results = torch.zeros((tokens * top_k, x.shape[1]), dtype=torch.float32)
    for expert in range(down.shape[0]):
        mine = (slots == expert).nonzero().flatten()
        if len(mine):
            up, back = (None if item is None else item[expert] for item in (gate_up_bias, down_bias))
            rows = x[mine // top_k].float()
            results[mine] = fixed_mlp(rows, gate_up[expert], down[expert], None, activation, up, None, back)
    here = (slots >= 0) & (slots < down.shape[0])
    shares = torch.where(here, topk_weights.flatten().float(), 0.0).view(tokens, top_k, 1)
    found = results.view(tokens, top_k, -1)
    total = found[:, 0] * shares[:, 0]
    for place in range(1, top_k):
        total = total + found[:, place] * shares[:, place]
    return total.to(x.dtype)


def quantized(x: Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same with INT8 or INT4 codes: widened in registers, or multiplied as bytes where the processor can."""
    source = weight.source if isinstance(weight, PackedWeight) else weight
    out = x.new_empty((*x.shape[:-1], source.shape[0]))
    bits = 8 if source.fmt is QuantFormat.INT8 else 4
    codes, block = source.data, source.block_size or 0
    scale, zero, act = source.scale, source.zero_point, _ACTIVATIONS[activation]
    if zero is not None and zero.dtype is not torch.int32:
        zero = zero.to(torch.int32)
    if _quantized(x, codes, scale, zero, bias, out, act, bits, block) is False:
        _quantized(x.contiguous(), codes.contiguous(), scale, zero, bias, out, act, bits, block)
    return out
