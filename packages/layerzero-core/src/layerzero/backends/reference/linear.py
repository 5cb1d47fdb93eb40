"""Linear layer with an optional activation, and embedding lookup."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype
from layerzero.errors import InvalidInputError
from layerzero.reasons import ReasonCode

__all__ = ["ACTIVATIONS", "embedding", "linear"]

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Matrix product, bias and activation: activation(x @ weight.T + bias).

    The product is torch's own: it accumulates low-precision inputs in float32 and follows autocast, and widening a
    whole weight matrix at every call would buy nothing. The activation is taken in float32.
    """
    out = F.linear(x, weight, bias)
    if activation is None:
        return out
    wide = out.to(compute_dtype(out))
    if activation == "gelu":
        wide = F.gelu(wide)
    elif activation == "gelu_tanh":
        wide = F.gelu(wide, approximate="tanh")
    elif activation == "silu":
        wide = F.silu(wide)
    elif activation == "relu":
        wide = F.relu(wide)
    else:
        raise InvalidInputError(
            code=ReasonCode.VALUE_INVALID, value=f"activation {activation!r}", limit=f"one of {', '.join(ACTIVATIONS)}"
        )
    return wide.to(out.dtype)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """Rows of `weight`; the row `padding_idx` receives no gradient."""
    return F.embedding(ids, weight, padding_idx)
