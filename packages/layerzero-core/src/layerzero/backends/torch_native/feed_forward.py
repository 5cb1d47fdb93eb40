"""The feed-forward block on torch's own products: two calls of the BLAS and the activation between them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["activated", "gated", "mlp", "narrow_on_cpu"]


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation, in the dtype of x (torch computes it in float32 and rounds once)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def narrow_on_cpu(x: Tensor) -> bool:
    """Whether x is of 16 bits and on a CPU, most of which multiply such numbers slower than wide ones."""
    return x.device.type == "cpu" and x.element_size() == 2


def gated(x: Tensor, activation: str, inner: int) -> Tensor:
    """The activation of x [..., inner], or of the first half of x [..., 2 inner] times the second."""
    if x.shape[-1] == inner:
        return activated(x, activation)
    gate, up = x.chunk(2, dim=-1)
    return activated(gate, activation) * up


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
    """`F.linear`, activation, `F.linear`.

    On a CPU 16-bit numbers are widened first, so that nothing is rounded between the two products: with it some
    results would leave the bounds. On a GPU what stands between them is rounded to the dtype of x, as everywhere.
    """
    dtype = x.dtype
    if narrow_on_cpu(x):
        x, up_weight, down_weight = x.float(), up_weight.float(), down_weight.float()
        gate_weight, up_bias, gate_bias, down_bias = (
            None if item is None else item.float() for item in (gate_weight, up_bias, gate_bias, down_bias)
        )
    up = F.linear(x, up_weight, up_bias)
    if gate_weight is None:
        inner = gated(up, activation, down_weight.shape[1])
    else:
        inner = activated(F.linear(x, gate_weight, gate_bias), activation) * up
    return F.linear(inner, down_weight, down_bias).to(dtype)
