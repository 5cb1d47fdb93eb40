"""SDPA's kernels for CUDA in a traced graph: `F.scaled_dot_product_attention`, where torch would choose the same one.

Their aten ops cannot be called in a graph that Dynamo traces: the random seeds they return have no device there. torch
itself decides between them when the graph is lowered, so that decision is asked for first, on fake tensors; where it
differs from LayerZero's, the op stays opaque and runs the kernel that was selected.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CHOSEN_BY_TORCH", "agrees", "attention"]

_log = logging.getLogger("layerzero.torch_ops")

# The function of a kernel -> torch's number for it (torch.nn.attention.SDPBackend).
CHOSEN_BY_TORCH = {
    "layerzero.backends.sdpa.kernels:flash_cuda": 1,
    "layerzero.backends.sdpa.kernels:efficient_cuda": 2,
    "layerzero.backends.sdpa.kernels:cudnn_cuda": 3,
}


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, is_causal: Any, scale: Any, *rest: Any
) -> Tensor:
    """Attention on canonical arguments, [B, H, S, D], without a mask. Traced by Dynamo."""
    grouped = bool(query.shape[1] != key.shape[1])
    return F.scaled_dot_product_attention(
        query, key, value, None, 0.0, bool(is_causal), scale=scale, enable_gqa=grouped
    )


def agrees(function: str, args: tuple[Any, ...], layout: str | None, dtype: str) -> bool:
    """Whether torch would run this very kernel for a call; `args` are stand-ins of known sizes beside real devices."""
    query, key, value, mask, _, is_causal, scale, _, _, _, return_lse = args
    if mask is not None or return_lse or (scale is not None and scale <= 0) or is_causal == "bottom_right":
        return False
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            q, k, v = (_like(item, layout, getattr(torch, dtype)) for item in (query, key, value))
            grouped = q.shape[1] != k.shape[1]
            found = torch._fused_sdp_choice(q, k, v, None, 0.0, bool(is_causal), scale=scale, enable_gqa=grouped)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError):  # a torch that cannot say it
        _log.info("torch cannot say which attention it would run; %s stays an opaque op", function, exc_info=True)
        return False
    if int(found) != CHOSEN_BY_TORCH[function]:
        _log.info("torch would run kernel %d of its own, not %s, which stays an opaque op", int(found), function)
        return False
    return True


def _like(item: Tensor, layout: str | None, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(tuple(item.shape), tuple(item.stride()), dtype=dtype, device=item.device)
    if made.dim() == 3:
        return made.unsqueeze(1)
    return made.transpose(1, 2) if layout == "BSHD" else made
