"""Linear layer with an optional activation, and embedding lookup."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.feed_forward import ACTIVATIONS, activate
from layerzero.backends.reference.precision import compute_dtype, no_autocast
from layerzero.backends.reference.quantize import dequantize, quantize
from layerzero.model.packed import PackedWeight, activation_scheme
from layerzero.model.quant import QuantizedTensor

__all__ = ["ACTIVATIONS", "embedding", "linear"]


def linear(
    x: Tensor, weight: Tensor | QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Matrix product, bias and activation: activation(x @ weight.T + bias).

    The product of a plain weight is torch's own: it accumulates low-precision inputs in float32 and follows autocast,
    and widening a whole weight matrix at every call would buy nothing. The activation is taken in float32.
    A quantized weight is widened to float32 and everything is computed in that.
    """
    if not isinstance(weight, Tensor):
        return _quantized(x, weight, bias, activation)
    out = F.linear(x, weight, bias)
    if activation is None:
        return out
    return activate(out.to(compute_dtype(out)), activation).to(out.dtype)


def _quantized(
    x: Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, activation: str | None
) -> Tensor:
    source = weight if isinstance(weight, QuantizedTensor) else weight.source
    act = None if isinstance(weight, QuantizedTensor) else weight.act
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    if act is not None:
        # From float32 whatever the dtype: which of two codes is nearer must not depend on how wide x came in.
        stored = dequantize(quantize(x.to(torch.float32), activation_scheme(source.fmt)), dtype)
        # A gradient passes as if nothing had been rounded.
        wide = wide + (stored - wide).detach() if x.requires_grad else stored
    with no_autocast(x.device.type):
        out = F.linear(wide, dequantize(source, dtype), None if bias is None else bias.to(dtype))
    return (out if activation is None else activate(out, activation)).to(x.dtype)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """Rows of `weight`; the row `padding_idx` receives no gradient."""
    return F.embedding(ids, weight, padding_idx)
