"""Adapters that differ from another one in their gradient alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from layerzero.model.kernel import KernelSpec


class GradientVariant(functools.partial[Any]):
    """An adapter with options that only its backward pass looks at: without a gradient it is the very same kernel.

    `deterministic_attention = GradientVariant(attention, deterministic=True)`. Tuning then times one of the two where
    no gradient is asked for: a race of a kernel against itself is won by chance.
    """


def twins(kernels: Mapping[str, KernelSpec]) -> dict[str, str]:
    """Of these kernels those that are another of them without a gradient, by the id of that one.

    Only adapters that are imported already are looked at: who is about to be timed has been bound.
    """
    found = {name: _adapter(spec) for name, spec in kernels.items()}
    owners = {id(adapter): name for name, adapter in found.items() if adapter is not None}
    return {
        name: owners[id(adapter.func)]
        for name, adapter in found.items()
        if isinstance(adapter, GradientVariant) and id(adapter.func) in owners
    }


def _adapter(spec: KernelSpec) -> Any:
    module, _, name = spec.function.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
