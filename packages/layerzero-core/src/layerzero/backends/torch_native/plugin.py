"""Plugin of the built-in backend `torch`; it enters by the same door as any third party's."""

from __future__ import annotations

from layerzero.plugin import backend_hooks

layerzero_register, layerzero_capabilities, layerzero_health = backend_hooks(__package__)
