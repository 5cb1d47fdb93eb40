"""The hook of this package: four ops. Their references and baselines come with them."""

from __future__ import annotations

from layerzero.plugin import Registrar, hookimpl
from layerzero_linear_attention.ops import OPS

LAYERZERO_API = ">=2,<3"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the ops."""
    for op in OPS:
        registrar.op(op)
