"""SwiGLU block by Liger: both projections, SiLU and the product in one Triton kernel, then the projection back."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

_library: Any = importlib.import_module("liger_kernel.ops.mlp")


def _few_rows(configs: list[Any], given: dict[str, Any], **words: Any) -> list[Any]:
    """What Liger tries at each first call: fewer rows than its lower tile has need no higher one, and no order."""
    fit = [item for item in configs if item.kwargs["BLOCK_M"] == 64 and item.kwargs["GROUP_SIZE_M"] == 1]
    return fit if fit and (given | words)["S"] < 64 else configs


for _name in {"_swiglu_kernel_forward", "_swiglu_kernel_forward_inference"} & vars(_library).keys():
    getattr(_library, _name).early_config_prune = _few_rows


class _Once(_library.LigerMLPFunction):  # type: ignore[misc] # the vendor has no types
    """Liger's function overwrites what it saved when it runs backward; a second run would be wrong without a word."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if getattr(ctx, "spent", False):
            raise RuntimeError(
                "liger.mlp.triton can run backward once: it overwrites what it saved. "
                "For retain_graph=True choose another kernel, for example backend='torch'"
            )
        ctx.spent = True
        return _library.LigerMLPFunction.backward(ctx, *grads)


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    activation: str,
    up_bias: None,
    gate_bias: None,
    down_bias: None,
) -> Tensor:
    """down(silu(x @ gate.T) * (x @ up.T)); a packed up_weight holds the gate in its first half."""
    if gate_weight is None:
        inner = down_weight.shape[1]
        gate_weight, up_weight = up_weight[:inner], up_weight[inner:]
    # The kernel wants [B, S, H] and tiles S.
    rows = x.reshape(1, -1, x.shape[-1])
    out: Tensor = _Once.apply(rows, gate_weight, up_weight, down_weight)
    return out.view(*x.shape[:-1], down_weight.shape[0])
