"""The hook of this package: ops of its own, and no backend."""

from __future__ import annotations

from layerzero.plugin import Registrar, hookimpl
from layerzero_models.drafts.ops import SAMPLE_SPECULATIVE, SAMPLE_TREE

LAYERZERO_API = ">=2,<3"


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Register the ops that verify drafted tokens."""
    registrar.op(SAMPLE_SPECULATIVE)
    registrar.op(SAMPLE_TREE)
