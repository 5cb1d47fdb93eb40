"""Head and cross-entropy in one by Liger: some rows of the logits at a time, and their gradients in the same pass.

Liger's own function multiplies the gradients it kept in place each time a graph is run backward, and computes none
where only the head needs one. So its forward is called from a function of ours, which keeps what it gives. The mean is
taken here, so that no row to count gives 0.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

_library: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
# Logits at a time: for each piece the float32 gradient of the whole head is read and written once, and left to itself
# Liger takes no more logits than x has numbers, 256 rows of a vocabulary of 128256.
_LOGITS = 1 << 28
_BOUNDED = "chunk_mem_const" in inspect.signature(_library.fused_linear_cross_entropy_forward).parameters  # from 0.8.3


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float | None,
    softcap: float | None,
    z_loss: float | None,
    reduction: str,
) -> Tensor:
    """Float32 loss, summed or its mean."""
    rows, targets = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    options = (ignore_index, z_loss or 0.0, label_smoothing or 0.0, "sum", softcap)
    total: Tensor = _Fused.apply(rows, weight, bias, targets, options)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        ignore_index, z_loss, smoothing, reduction, softcap = options
        wanted = ctx.needs_input_grad[:3]
        loss, _, _, _, *grads = _library.fused_linear_cross_entropy_forward(
            x.detach().requires_grad_(any(wanted)),
            weight.detach().requires_grad_(wanted[1]),
            targets,
            bias=None if bias is None else bias.detach(),
            ignore_index=ignore_index,
            lse_square_scale=z_loss,
            label_smoothing=smoothing,
            reduction=reduction,
            softcap=softcap,
            accum_dtype=torch.float32,
            **({"chunk_mem_const": max(1, _LOGITS // max(1, x.numel()))} if _BOUNDED else {}),
        )
        kept = [grad if needed else None for grad, needed in zip(grads, wanted, strict=True)]
        ctx.save_for_backward(*kept)
        ctx.dtypes = [None if item is None else item.dtype for item in (x, weight, bias)]
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        grads = [
            None if grad is None else (grad * above[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None)
