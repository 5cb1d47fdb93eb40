"""Linear layers of a patched model: through `lz.linear` where the selection has a kernel of its own for few rows.

Decode multiplies one row a sequence with every weight, and on a CPU that is most of the time of a step. Whether there
is anything to gain is asked of the selection once for each size and dtype, when the model is patched: what was
measured decides, else the kernels' priorities. Which kernel runs is decided at every call, as for any op, so a long
prompt goes to torch's product where that is the better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import which
from layerzero.errors import LayerZeroError
from layerzero_models.transformers.neighbours import Neighbours, unfit

__all__ = ["Linears"]

_TORCH = ("torch.", "reference.")  # products that `F.linear` makes without a selection before it


class Linears:
    """What one patch asked about products, by size, dtype, device and bias."""

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._known: dict[Any, bool] = {}

    def worth(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether one row times this weight would run on something else than torch's own product, or all are asked."""
        if self._everything:
            return True
        if weight.device.type != "cpu":  # elsewhere a vendor's product is what torch calls too
            return False
        case = (weight.shape, weight.dtype, bias is None)
        if case not in self._known:
            x = torch.zeros((1, weight.shape[1]), dtype=weight.dtype)
            try:
                with torch.no_grad():
                    kernel = which("linear", x, weight.detach(), None if bias is None else bias.detach())
                self._known[case] = not kernel.startswith(_TORCH)
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
