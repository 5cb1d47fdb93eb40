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
from layerzero_cpu.library import adapted, native

ACTIVATIONS = {None: 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}


@adapted
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(x @ weight.T + bias), summed in float32."""
    return _multiplied(native.linear, x, weight, bias, activation)


def _multiplied(run: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if run(x, weight, bias, out, ACTIVATIONS[activation]) is False:
        run(x.contiguous(), weight.contiguous(), bias, out, ACTIVATIONS[activation])
    return out


def fixed(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same, computed in one way for any number of rows."""
    return _multiplied(native.linear_fixed, x, weight, bias, activation)


def quantized(x: Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """The same with INT8 or INT4 codes: widened in registers, or multiplied as bytes where the processor can."""
    source = weight.source if isinstance(weight, PackedWeight) else weight
    out = x.new_empty((*x.shape[:-1], source.shape[0]))
    bits = 8 if source.fmt is QuantFormat.INT8 else 4
    codes, block = source.data, source.block_size or 0
    scale, zero, act = source.scale, source.zero_point, ACTIVATIONS[activation]
    if zero is not None and zero.dtype is not torch.int32:
        zero = zero.to(torch.int32)
    if native.linear_quantized(x, codes, scale, zero, bias, out, act, bits, block) is False:
        native.linear_quantized(x.contiguous(), codes.contiguous(), scale, zero, bias, out, act, bits, block)
    return out
