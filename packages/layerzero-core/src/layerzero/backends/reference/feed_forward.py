"""The feed-forward block of a transformer: one product, an activation (gated or not), one product back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype, no_autocast
from layerzero.errors import invalid

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
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Computed in float32 from end to end; only the result is rounded."""
    wide = compute_dtype(x, up_weight, down_weight, gate_weight)
    gate_weight, up_bias, gate_bias, down_bias = (
        None if item is None else item.to(wide) for item in (gate_weight, up_bias, gate_bias, down_bias)
    )
    weights = (up_weight.to(wide), down_weight.to(wide), gate_weight)
    with no_autocast(x.device.type):
        return feed_forward(x.to(wide), *weights, activation, up_bias, gate_bias, down_bias).to(x.dtype)
