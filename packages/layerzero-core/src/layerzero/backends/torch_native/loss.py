"""Cross-entropy on torch's fused log-softmax and negative log-likelihood."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDE = (torch.float32, torch.float64)
_MEAN, _SUM = 1, 2  # torch's numbers for these reductions
_cross_entropy: Any = torch._C._nn.cross_entropy_loss  # what `F.cross_entropy` calls


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
    wide = logits if logits.dtype in _WIDE else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    if reduction == "mean" and label_smoothing is None and z_loss is None and not return_lse:
        if labels.ndim != 1:
            wide, labels = wide.reshape(-1, wide.shape[-1]), labels.reshape(-1)
        return _mean(wide, labels if labels.dtype is torch.int64 else labels.to(torch.int64), ignore_index)
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


def _mean(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The mean loss over the rows that count, 0 where none does.

    torch divides by the number of those rows and gives NaN for none. On a CPU looking at the result is cheap; elsewhere
    the host would wait for the device, so the sum is divided here, by the number that torch counts anyway.
    """
    hidden = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if logits.is_cpu and type(logits) is Tensor and not hidden:
        loss = _cross_entropy(logits, labels, None, _MEAN, ignore_index, 0.0)
        if not math.isnan(loss.item()) or bool((labels != ignore_index).any()):
            return loss  # type: ignore[no-any-return]
    total, count = torch.ops.aten.nll_loss_forward.default(
        torch.log_softmax(logits, dim=-1), labels, None, _SUM, ignore_index
    )
    if total.requires_grad or type(total) is not Tensor:
        return total / count.clamp(min=1.0)  # type: ignore[no-any-return]
    return total.div_(count.clamp_(min=1.0))
