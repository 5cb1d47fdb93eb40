"""The opaque ops and twins of the late ops, one module for each family.

A module of `MORE` may have
* `OPS`      its opaque ops
* `TWINS`    public name -> what Dynamo traces in its place. A twin reaches its op as `torch.ops.layerzero.<op>.default`
             when it is traced, not when the module is imported: the ops are being defined at that time.
* `BRIDGES`  op -> (ops, canonical args, layout, backend) -> result, where the op's schema differs from its canonical
             arguments followed by the backend
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from layerzero.torch_ops.opaque import OpaqueOp

__all__ = ["MORE", "bridge_of", "more_ops", "more_twins"]

MORE: tuple[str, ...] = (
    "layerzero.torch_ops.more_feed_forward",
    "layerzero.torch_ops.more_grouped",
    "layerzero.torch_ops.more_positional",
    "layerzero.torch_ops.more_quant",
    "layerzero.torch_ops.more_speculative",
    "layerzero.torch_ops.more_varlen",
)


def more_ops() -> tuple[OpaqueOp, ...]:
    """Every opaque op of the late ops."""
    return tuple(op for module in _modules() for op in getattr(module, "OPS", ()))


def more_twins() -> dict[str, Callable[..., Any]]:
    """Every twin of the late ops, by the name of the public function."""
    return {name: twin for module in _modules() for name, twin in getattr(module, "TWINS", {}).items()}


def bridge_of(op_id: str) -> Callable[..., Any] | None:
    """How a call of this op reaches its opaque op; None where the canonical arguments are the schema's."""
    for module in _modules():
        found: Callable[..., Any] | None = getattr(module, "BRIDGES", {}).get(op_id)
        if found is not None:
            return found
    return None


def _modules() -> list[Any]:
    return [importlib.import_module(name) for name in MORE]
