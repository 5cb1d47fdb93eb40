"""Hooks of the Liger Kernel backend: vendor, the Triton under it, this device."""

from __future__ import annotations

from layerzero.plugin import backend_hooks, needs_dist, needs_sm

layerzero_register, layerzero_capabilities, layerzero_health = backend_hooks(
    __package__, needs_sm(80), needs_dist("triton", ">=3.5,<4")
)
