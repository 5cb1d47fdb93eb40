"""Cross-entropy on torch's fused log-softmax and negative log-likelihood."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float | None,
    softcap: float | None,
    z_loss: float | None,
    reduction: str,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.cross_entropy` in float32; the mean is taken here, so that no row to count gives 0 and not NaN."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    loss = F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]),
        labels.reshape(-1).to(torch.int64),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing or 0.0,
    ).reshape(labels.shape)
    lse = torch.logsumexp(wide, dim=-1) if return_lse or z_loss is not None else None
    counted = labels != ignore_index if z_loss is not None or reduction == "mean" else None
    if z_loss is not None and lse is not None and counted is not None:
        loss = loss + torch.where(counted, z_loss * lse.square(), 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean" and counted is not None:
        loss = loss / counted.sum().clamp(min=1)
    return (loss, lse) if return_lse and lse is not None else loss
