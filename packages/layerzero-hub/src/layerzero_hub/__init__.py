"""Kernels from the Hugging Face Kernel Hub that are allowed, locked, verified, or refused.

    lz hub lock org/fast-norm@1      look at the kernel from all sides, write the hash of every byte
    lz hub install                   bring the store to what the lock says
    lz hub verify                    hash it all again

Mapped kernels (`[[hub.kernels]]`) are selected, tuned, explained and locked by policy like any other;
`load("org/fast-norm")` gives the verified module itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero_hub.errors import HubError
    from layerzero_hub.loading import LockedLayer, load

__all__ = ["HubError", "LockedLayer", "load"]

_HOME = {"HubError": "errors", "LockedLayer": "loading", "load": "loading"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
