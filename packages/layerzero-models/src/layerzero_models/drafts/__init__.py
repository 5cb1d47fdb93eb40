"""Drafted tokens: which of them a target model keeps (`lz.sample_speculative`, `lz.sample_tree`), and trees of them."""

from __future__ import annotations

from typing import Any

__all__ = ["sample_speculative", "sample_tree"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from layerzero import ops  # looked up there, an op of a plugin becomes known to torch

    return getattr(ops, name)
