"""The hook of this package: ops of its own, and no backend."""

from __future__ import annotations

from layerzero.plugin import Registrar, hookimpl
from layerzero_models.drafts.ops import SAMPLE_SPECULATIVE, SAMPLE_TREE
from layerzero_models.linear_loss import LINEAR_CROSS_ENTROPY

LAYERZERO_API = ">=2,<3"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the ops that verify drafted tokens, and the head of a language model with its loss."""
    for op in (SAMPLE_SPECULATIVE, SAMPLE_TREE, LINEAR_CROSS_ENTROPY):
        registrar.op(op)
