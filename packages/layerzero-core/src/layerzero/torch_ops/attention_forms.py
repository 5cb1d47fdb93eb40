"""torch's attention kernels as they stand in a traced graph: the aten op the eager kernel calls, on the same arguments.

`F.scaled_dot_product_attention` would choose between them a second time when the graph is lowered, by rules of its own.
Here the graph holds the op of the kernel that was selected, its first result and nothing else. Dynamo follows an op of
`torch.ops.aten` but not the C binding that the eager kernels call (`backends.sdpa.kernels`); all else is as there.

`form` puts around a kernel what its decision says has to be done to the inputs, by the code that eager calls run
(`dispatch.adapt`), and gives it a name that can be a constant of a graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from layerzero.dispatch.adapt import adapt
from layerzero.model.attention import upright
from layerzero.model.context import Context

__all__ = ["CUDA", "FORMS", "form"]

# By name: backends live on a floor above, which nothing below may import.
_eager: Any = importlib.import_module("layerzero.backends.sdpa.kernels")

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default

# Name -> kernel with the adaptation of its inputs. Filled while graphs are traced, read by Dynamo.
FORMS: dict[str, Callable[..., Any]] = {}


def form(function: str, kernel: Callable[..., Any], ctx: Context, steps: list[str]) -> str:
    """The name in `FORMS` of a kernel with these steps before it, for calls such as this one."""
    layout = "" if ctx.layout is None else ctx.layout.value
    rank = "folded" if ctx.folded else str(ctx.rank)
    words = (function, rank, layout, ctx.dtype, ctx.autocast or "", ctx.device.device_type, *sorted(steps))
    name = "|".join(words)
    if name not in FORMS:
        FORMS[name] = adapt(kernel, ctx, steps, True)
    return name


# -- traced by Dynamo ------------------------------------------------------------------------------
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: Any,
    scale: float | None,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
) -> Any:
    """FlashAttention-2 as built into torch; mask values are tensors in a graph, which it does not take."""
    if scale is not None and scale <= 0.0:
        query, scale = upright(query, scale)
    result = _flash(query, key, value, dropout_p, bool(is_causal), False, scale=scale)
    return (result[0], result[1]) if return_lse else result[0]


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


efficient = _eager.fused(torch.ops.aten._scaled_dot_product_efficient_attention.default, (), _bias, _eager.rows_of)
cudnn = _eager.fused(torch.ops.aten._scaled_dot_product_cudnn_attention.default, (False,), _bias, _eager.squeezed)

# The function of an eager kernel -> its form in a graph.
CUDA: dict[str, Callable[..., Any]] = {
    "layerzero.backends.sdpa.kernels:flash_cuda": flash,
    "layerzero.backends.sdpa.kernels:efficient_cuda": efficient,
    "layerzero.backends.sdpa.kernels:cudnn_cuda": cudnn,
}
