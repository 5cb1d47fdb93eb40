"""What is known of compiled kernels when the first World is built: the index on disk, read once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from layerzero.reasons import Reason, reason
from layerzero.registry.kernels import KernelRegistry

_GIVE_UP = 3  # artifacts of one kernel that fail before the whole kernel is left alone


def known(registry: KernelRegistry) -> dict[str, Any]:
    """The part of a World that the index on disk fills; nothing is read where no kernel compiles at run time."""
    if not any(kernel.jit for kernel in registry.kernels.values()):
        return {}
    from layerzero.jit.index import Index
    from layerzero.plugin import artifacts  # late: most processes have no such kernel

    folder = artifacts.cache_folder()
    if artifacts.distrust(folder) is not None:
        return {}
    index = Index(folder)
    failed = index.failed()
    return {"ready": index.ready(), "uncompilable": with_hopeless({key: failure(text) for key, text in failed.items()})}


def failure(text: str) -> Reason:
    """Why an artifact is not to be had."""
    return reason("JIT_FAILED", text)


def with_hopeless(failed: Mapping[Any, Reason]) -> Mapping[Any, Reason]:
    """Kernels that failed for several values are left alone for all of them."""
    found = dict(failed)
    by_kernel: dict[tuple[str, ...], list[Any]] = {}
    for key, why in failed.items():
        if isinstance(key, tuple) and why.code == "JIT_FAILED":
            by_kernel.setdefault((key[0], *key[1][:2]), []).append(key)
    for (kernel_id, *_), keys in by_kernel.items():
        if len(keys) >= _GIVE_UP:
            found[kernel_id] = failed[keys[-1]]
    return MappingProxyType(found)
