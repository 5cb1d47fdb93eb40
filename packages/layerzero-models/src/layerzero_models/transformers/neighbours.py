"""Projections of one input, laid side by side in memory so that one product does the work of several.

The parameters stay the same objects with the same values: their data become neighbouring rows of one matrix, which
takes no more memory. Whoever moves or replaces them later breaks the neighbourhood; that is noticed at the next call,
and each projection works by itself again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _any_hook

__all__ = ["Neighbours", "unfit"]

_grad_enabled = torch.is_grad_enabled


def unfit(parts: Sequence[Any]) -> str:
    """Why these cannot be laid side by side; empty when they can."""
    first = parts[0]
    for part in parts:
        if type(part) is not nn.Linear:
            return f"{type(part).__name__} is not a plain nn.Linear"
        if "forward" in vars(part):
            return "a projection has a forward of its own"
        if type(part.weight) is not nn.Parameter or type(part.weight.data) is not Tensor:
            return "the weights are not plain tensors"
        if part.weight.device.type == "meta":
            return "the weights are on the meta device"
        same = (part.in_features, part.weight.dtype, part.weight.device, part.bias is None)
        if same != (first.in_features, first.weight.dtype, first.weight.device, first.bias is None):
            return "the projections differ in width, dtype, device or bias"
    if len({id(part.weight) for part in parts}) < len(parts):
        return "projections share one weight"
    return ""


class Neighbours:
    """Linears of one input. `weight` and `bias` are those of all of them, `sizes` the rows of each, and `product` the
    function that multiplies."""

    __slots__ = ("_hooks", "_places", "bias", "parts", "product", "sizes", "stash", "weight")

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.parts = tuple(parts)
        self.sizes = [part.out_features for part in parts]
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        # What the first of several called in a row computed for the others: (input, results).
        self.stash: tuple[Any, ...] | None = None
        self._hooks = tuple(hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks))
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self.weight = self._joined("weight")
        self.bias = None if parts[0].bias is None else self._joined("bias")

    def _joined(self, name: str) -> Tensor:
        owned = [part._parameters for part in self.parts]
        with torch.no_grad():
            whole = torch.cat([own[name].data for own in owned])  # type: ignore[union-attr]
            for own, piece in zip(owned, torch.split(whole, self.sizes), strict=True):
                own[name].data = piece  # type: ignore[union-attr]
                self._places.append((own, name, piece.data_ptr()))
        return whole

    def together(self) -> bool:
        """Whether one product may stand for all: nobody needs a gradient, moved a weight or hangs on a projection."""
        if _grad_enabled() or any(self._hooks) or _any_hook():  # type: ignore[no-untyped-call]
            return False
        for own, name, place in self._places:
            if own[name].data_ptr() != place:
                return False
        return True

    def part(self) -> None:
        """Give every parameter memory of its own again."""
        self.stash = None
        with torch.no_grad():
            for own, name, place in self._places:
                if own[name].data_ptr() == place:
                    own[name].data = own[name].data.clone()
