"""Plugin of the built-in backend `torch`; it enters by the same door as any third party's."""

from __future__ import annotations

from layerzero.backends.hooks import hooks
from layerzero.backends.torch_native.linear_loss import LINEAR_CROSS_ENTROPY

layerzero_register, layerzero_capabilities, layerzero_health = hooks(__package__, ops=(LINEAR_CROSS_ENTROPY,))
