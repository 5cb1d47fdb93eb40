"""The ops of patched models called through a function of one's own: `lz verify` names and watches every kernel so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from layerzero_models.record import Changes
from layerzero_models.transformers import attending, experts, quick, static_cache


@contextmanager
def redirected(call: Callable[..., Any]) -> Iterator[None]:
    """Within the block models that are patched inside it call an op as `call(op, *args, **kwargs)`."""

    def norm(gemma: bool, x: Tensor, weight: Tensor, eps: float, facts: Any) -> Any:
        return call("gemma_rms_norm" if gemma else "rms_norm", x, weight, eps)

    def add_norm(gemma: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float, facts: Any) -> Any:
        return call("gemma_add_rms_norm" if gemma else "add_rms_norm", x, residual, weight, eps)

    def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, facts: Any) -> Any:
        return call("layer_norm", x, weight, bias, eps)

    def activate(op: str, x: Tensor, rest: tuple[str, ...]) -> Any:
        return call(op, x, *rest)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return call("rope", q, k, cos, sin, layout="BHSD" if unsqueeze_dim == 1 else "BSHD")

    changes = Changes()
    try:
        for function in (norm, add_norm, layer, activate, rotate):
            changes.set(quick, function.__name__, function)
        changes.set(quick, "product", partial(call, "linear"))
        changes.set(quick, "public", call)
        changes.set(attending, "attention", partial(call, "attention"))
        changes.set(experts, "moe", partial(call, "moe"))
        changes.set(static_cache, "attention", partial(call, "attention"))
        changes.set(static_cache, "paged_attention", partial(call, "paged_attention"))
        yield
    finally:
        changes.undo()
