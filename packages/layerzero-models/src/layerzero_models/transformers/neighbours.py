"""Linear layers of a patched model: several of one input in one product, and which are worth a kernel of their own.

Projections of one input are laid side by side in memory: the parameters stay the same objects with the same values,
their data become neighbouring rows of one matrix, which takes no more memory. Whoever moves or replaces them later
breaks the neighbourhood; that is noticed at the next call, and each projection works by itself again.

Decode multiplies one row a sequence with every weight, and that is most of the time of a step. Whether `lz.linear`
gains anything is asked once for each size and dtype, when the model is patched: on a CPU of the selection, elsewhere
whether there is a kernel for few rows. Which kernel runs is decided at every call, as for any op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as _any_hook

from layerzero import list_kernels, which
from layerzero.errors import LayerZeroError
from layerzero.model.enums import Platform

_TORCH = ("torch.", "reference.")  # products that `F.linear` makes without a selection before it
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
        self.bias: Tensor | None = None if parts[0].bias is None else self._joined("bias")

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


def few_rows(op: str, weight: Tensor) -> int:
    """Rows up to which a kernel made for few rows may run an op with such a weight; 0 where there is none."""
    name, cpu = str(weight.dtype).removeprefix("torch."), weight.device.type == "cpu"
    found = list_kernels(op, available=True)
    fit = [kernel for kernel in found if name in kernel.dtypes and cpu == (Platform.CPU in kernel.platforms)]
    limits = [limit.max for kernel in fit for dim, limit in kernel.limits if dim == "rows"]
    return max((most for most in limits if most is not None), default=0)


class Linears:
    """What one patch asked about products, by size, dtype, device and bias."""

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._known: dict[Any, bool] = {}

    def worth(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether one row or four times this weight run on another kernel than torch's product, or all are asked."""
        if self._everything:
            return True
        if weight.device.type != "cpu":  # many rows are a vendor's product, which is what torch calls too
            return few_rows("linear", weight) > 0
        case = (weight.shape, weight.dtype, bias is None)
        if case not in self._known:
            x = torch.zeros((4, weight.shape[1]), dtype=weight.dtype)
            try:
                with torch.no_grad():
                    rest = (weight.detach(), None if bias is None else bias.detach())
                    kernels = [which("linear", x[:rows], *rest) for rows in (1, 4)]
                self._known[case] = not all(kernel.startswith(_TORCH) for kernel in kernels)
            except LayerZeroError:  # a policy under which nothing may run, or a size no kernel takes
                self._known[case] = False
        return self._known[case]

    def single(self, model: nn.Module, joined: Iterable[Neighbours]) -> Iterator[tuple[str, nn.Linear]]:
        """The plain linear layers that are not computed together with others, where it is worth it."""
        taken = {id(part) for neighbours in joined for part in neighbours.parts}
        for name, module in model.named_modules():
            if id(module) in taken or type(module) is not nn.Linear or unfit((module,)):
                continue
            if self.worth(module.weight, module.bias):
                yield name, module
