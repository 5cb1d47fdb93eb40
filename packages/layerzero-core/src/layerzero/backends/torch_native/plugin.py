"""Plugin of the built-in backend `torch`; it enters by the same door as any third party's."""

from __future__ import annotations

from layerzero.backends.hooks import hooks

layerzero_register, layerzero_capabilities, layerzero_health = hooks(__package__)
