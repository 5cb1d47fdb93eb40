"""torch's attention kernels as they stand in a traced graph: the aten op the eager kernel calls, on the same arguments.

`F.scaled_dot_product_attention` would choose between them a second time when the graph is lowered, by rules of its own.
Here the graph holds the op of the kernel that was selected, its first result and nothing else. Dynamo follows an op of
`torch.ops.aten` but not the C binding that the eager kernels call (`kernels`); all else is as there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from layerzero.backends.sdpa.kernels import fused, rows_of, squeezed

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as an additive bias [B, H, Sq, Sk] whose rows start on 16-byte boundaries, without a guard on any size."""
    cols = key.shape[2]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    mask = mask.to(query.dtype).expand(*mask.shape[:-1], cols)
    step = 16 // mask.element_size()
    if not (statically_known_true(cols % step == 0) and statically_known_true(mask.stride(-1) == 1)):
        # By one at least: whether an open length needs none would be a guard on it.
        mask = F.pad(mask, (0, (cols // step + 1) * step - cols)).narrow(-1, 0, cols)
    elif mask.dim() > 1 and not statically_known_true(mask.stride(-2) % step == 0):
        mask = mask.contiguous()
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], cols)


def _run_flash(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float, causal: bool, scale: Any) -> Any:
    """Mask values are tensors in a graph, which this kernel does not take."""
    return _flash(q, k, v, p, causal, False, scale=scale)


flash = fused(_run_flash, (), _bias, lambda lse, rows: lse)
efficient = fused(torch.ops.aten._scaled_dot_product_efficient_attention.default, (), _bias, rows_of)
cudnn = fused(torch.ops.aten._scaled_dot_product_cudnn_attention.default, (False,), _bias, squeezed)
