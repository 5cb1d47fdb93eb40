"""Head and cross-entropy in one by QuACK: some rows of the logits at a time, and their gradients in the same pass.

QuACK's own functions multiply the gradients they kept in place each time a graph is run backward. So their forward is
called from a function of ours, which runs it, and its backward with a gradient of one, when the loss is computed. Rows
are padded to a multiple of eight, which its products need, with labels that do not count. The mean is taken here, so
that no row to count gives 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from layerzero_flashattn.compiler import library
from layerzero_flashattn.quiet import quietly

_library: Any = library("quack.linear_cross_entropy")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: None,
    ignore_index: int,
    label_smoothing: None,
    softcap: None,
    z_loss: None,
    reduction: str,
) -> Tensor:
    """Float32 loss, summed or its mean."""
    rows, targets = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    total: Tensor = _Fused.apply(rows, weight, targets, ignore_index)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        missing = -x.shape[0] % 8
        rows = pad(x.detach(), (0, 0, 0, missing)).requires_grad_(wanted[0])
        head = weight.detach().requires_grad_(wanted[1])
        with torch.set_grad_enabled(any(wanted)):
            loss: Tensor = _chunked(rows, head, pad(targets, (0, missing), value=ignore_index), ignore_index)
        leaves = [item for item, needed in zip((rows, head), wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(loss, leaves) if leaves else ())
        of_x, of_weight = (next(found) if needed else None for needed in wanted)
        ctx.save_for_backward(None if of_x is None else of_x[: x.shape[0]], of_weight)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        grads = (None if grad is None else (grad * above[0]).to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None)


@quietly
def _chunked(rows: Tensor, head: Tensor, targets: Tensor, ignore_index: int) -> Any:
    return _library.chunked_linear_cross_entropy(
        rows, head, targets, ignore_index=ignore_index, reduction="sum", tuned=False
    )
