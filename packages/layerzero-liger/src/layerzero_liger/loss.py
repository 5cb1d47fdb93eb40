"""Cross-entropy by Liger.

Liger computes the gradient together with the loss and writes it over the logits, blanks the rows that do not count
even where no gradient is asked for, and keeps the loss in the dtype of the logits. Our op leaves its inputs alone and
returns float32, so the kernel always works on a float32 copy. The reduction is done here, because Liger's own
multiplies the kept gradient in place each time a graph is run backward.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_library: Any = importlib.import_module("liger_kernel.ops.cross_entropy")


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float | None,
    softcap: float | None,
    z_loss: float | None,
    reduction: str,
    return_lse: bool,
) -> Tensor:
    """Float32 loss with label smoothing, softcap and z-loss."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    recorded = torch.is_grad_enabled() and logits.requires_grad
    wide = rows.to(torch.float32, copy=True)
    options = (ignore_index, z_loss or 0.0, label_smoothing or 0.0, "none", softcap, False)
    if recorded:
        loss: Tensor = _library.LigerCrossEntropyFunction.apply(wide, targets, None, *options)[0]
    else:
        loss = _library.cross_entropy_forward(wide.detach(), targets, None, *options)[0]
    if reduction == "none":
        return loss.view(labels.shape)
    total = loss.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)
