"""The inputs of a captured call: tensors with a fixed place, refilled before each replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerzero.errors import CudaGraphUnsafeError

_PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))


class Inputs:
    """Copies of the tensors among some arguments, at any depth of lists, tuples and dicts; all else as it is."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [item.detach().clone() if isinstance(item, Tensor) else item for item in leaves]
        self.args, self.kwargs = pytree.tree_unflatten(self._leaves, self._spec)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with their fixed places."""
        return [item for item in self._leaves if isinstance(item, Tensor)]

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write other tensors of the same shapes and dtypes into place; all else has to be what it was."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise _changed(f"{len(leaves)} values", f"{len(self._leaves)} values, arranged as captured")
        for own, given in zip(self._leaves, leaves, strict=True):
            _check(own, given)
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor) and own is not given:
                own.copy_(given, non_blocking=True)


def _check(own: Any, given: Any) -> None:
    if isinstance(own, Tensor):
        if not isinstance(given, Tensor):
            raise _changed(type(given).__name__, "a tensor")
        if own.shape != given.shape or own.dtype != given.dtype:
            raise _changed(_words(given), _words(own))
    elif own is not given and not (isinstance(own, _PLAIN) and type(own) is type(given) and own == given):
        raise _changed(repr(given)[:80], repr(own)[:80])


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _changed(value: str, limit: str) -> CudaGraphUnsafeError:
    return CudaGraphUnsafeError(code="GRAPH_INPUT_CHANGED", value=value, limit=limit)
