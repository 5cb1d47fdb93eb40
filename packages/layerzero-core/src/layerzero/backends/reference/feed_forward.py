"""The feed-forward block of a transformer and its parts: linear layer, activation (gated or not), embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype, no_autocast
from layerzero.backends.reference.quantize import dequantize, quantize
from layerzero.errors import invalid
from layerzero.model.packed import PackedWeight, activation_scheme
from layerzero.model.quant import QuantizedTensor

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def activate(x: Tensor, activation: str) -> Tensor:
    """One of the four activations, in the dtype of `x`."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation not in ("gelu", "gelu_tanh"):
        raise invalid("VALUE_INVALID", f"activation {activation!r}", f"one of {', '.join(ACTIVATIONS)}")
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated(
    x: Tensor,
    activation: str,
    inner: int,
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """The activation of x [..., inner], or of the gate in x [..., 2 inner] times what stands beside it.

    The gate is the first half of x, or with `interleaved` every other number. `limit` bounds the gate from above and
    the other on both sides. "swigluoai" is gate * sigmoid(alpha * gate) * (up + 1).
    """
    if x.shape[-1] == inner:
        return activate(x, activation)
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swigluoai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return activate(gate, activation) * up


def feed_forward(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """The block in the dtype of its arguments, which all have the same one.

    With twice as many rows in `up_weight` as `down_weight` has columns, the first half of the rows is the gate.
    """
    up = F.linear(x, up_weight, up_bias)
    if gate_weight is None:
        inner = gated(up, activation, down_weight.shape[1])
    else:
        inner = activate(F.linear(x, gate_weight, gate_bias), activation) * up
    return F.linear(inner, down_weight, down_bias)


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    *biases: Tensor | None,
) -> Tensor:
    """`feed_forward` in float32 from end to end; only the result is rounded."""
    wide = compute_dtype(x, up_weight, down_weight, gate_weight)
    gate, *rest = (None if item is None else item.to(wide) for item in (gate_weight, *biases))
    with no_autocast(x.device.type):
        return feed_forward(x.to(wide), up_weight.to(wide), down_weight.to(wide), gate, activation, *rest).to(x.dtype)


# Gated activations: the first half of the last axis is the gate, the second half the value it multiplies.
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up."""
    return _both_halves(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """GeGLU: gelu(gate) * up; `approximate` is "none" (erf) or "tanh"."""
    return _both_halves(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def relu_and_mul(x: Tensor) -> Tensor:
    """ReGLU: relu(gate) * up."""
    return _both_halves(x, "relu")


def _both_halves(x: Tensor, activation: str) -> Tensor:
    return gated(x.to(compute_dtype(x)), activation, x.shape[-1] // 2).to(x.dtype)


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
