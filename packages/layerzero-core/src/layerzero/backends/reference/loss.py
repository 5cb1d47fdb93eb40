"""Cross-entropy of next-token logits."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.backends.reference.precision import compute_dtype


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
    """logsumexp(logits) - logits[label], for each row, then reduced; in float32 whatever the logits are.

    Label smoothing moves its share of the target to the uniform distribution; `z_loss` adds z * logsumexp². A row whose
    label is `ignore_index` costs nothing, and the mean is over the others: 0, not NaN, where there are none.
    """
    wide = logits.to(compute_dtype(logits))
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    counted = labels != ignore_index
    index = torch.where(counted, labels, 0).to(torch.int64)
    log_probs = torch.log_softmax(wide, dim=-1)
    loss = -log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if label_smoothing is not None:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_probs.mean(dim=-1)
    lse = torch.logsumexp(wide, dim=-1) if return_lse or z_loss is not None else None
    if z_loss is not None and lse is not None:
        loss = loss + z_loss * lse.square()
    loss = torch.where(counted, loss, 0.0)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / counted.sum().clamp(min=1)
    return (loss, lse) if return_lse and lse is not None else loss
