"""What changes for a kernel in a process of its own: what it may no longer promise, and what the way there costs."""

from __future__ import annotations

from dataclasses import replace

from layerzero.model.context import Context, element_bytes
from layerzero.model.decision import Transform
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.selection.transforms import elements

__all__ = ["NAME", "apart", "passage"]

NAME = "isolated"

# Gradients, writes into the caller's tensors, generators and masks with a meaning do not cross a process boundary.
_STAYS_HOME = frozenset({
    "backward", "lse_backward", "mask_grad", "inplace", "dropout", "generator", "block_mask", "chunk_mask", "paged",
    "nested",
})  # fmt: skip

# Rough prices, for ranking only: one round trip with its synchronisation, and bytes per µs of the copies.
_TRIP_US = {Platform.CPU: 150.0}
_TRIP_US_GPU = 200.0
_BYTES_PER_US = {Platform.CPU: 4_000.0}
_BYTES_PER_US_GPU = 1_000_000.0


def apart(kernel: KernelSpec) -> KernelSpec:
    """The kernel as its own process can serve it: never part of a graph, without a backward."""
    return replace(kernel, features=kernel.features - _STAYS_HOME, graph_safe=False)


def passage(ctx: Context) -> Transform:
    """The way there and back, as a priced step of the plan."""
    platform = ctx.device.platform
    rate = _BYTES_PER_US.get(platform, _BYTES_PER_US_GPU)
    return Transform(NAME, _TRIP_US.get(platform, _TRIP_US_GPU) + 2 * elements(ctx) * element_bytes(ctx.dtype) / rate)
