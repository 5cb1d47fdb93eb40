"""Cross-entropy by QuACK: loss and log-sum-exp of each row in one pass, gradient in a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero_flashattn.compiler import library
from layerzero_flashattn.quiet import hush_backward, quietly

_library: Any = library("quack.cross_entropy")
_forward = quietly(_library.cross_entropy_fwd)
_recorded = quietly(_library.cross_entropy)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: None,
    softcap: None,
    z_loss: None,
    reduction: str,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Float32 loss; the mean is taken here, so that no row to count gives 0 and not NaN."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    lse: Tensor | None = None
    if torch.is_grad_enabled() and logits.requires_grad:
        loss: Tensor = _recorded(rows, targets, ignore_index=ignore_index, reduction="none")
        hush_backward(loss)
    elif return_lse:
        loss, lse = _forward(rows, targets, ignore_index=ignore_index, return_lse=True)
    else:
        loss = _forward(rows, targets, ignore_index=ignore_index)
    if reduction == "none":
        loss = loss.view(labels.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / (targets != ignore_index).sum().clamp(min=1)
    return loss if lse is None else (loss, lse.view(labels.shape))
