"""Compiling our kernels for a device that is not here; some of their tiles depend on its multiprocessors."""

from __future__ import annotations

from layerzero.plugin import CompileOrder, triton_compiler
from layerzero_triton.kernels.launch import standing_for


def compile_order(order: CompileOrder) -> tuple[str, ...]:
    """Compile what the launches of one call need; the shared libraries among it."""
    with standing_for(order.device.multiprocessors):
        return triton_compiler.compile_order(order)
