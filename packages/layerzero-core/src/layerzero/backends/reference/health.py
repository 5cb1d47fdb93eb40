"""Known answers for the reference."""

from __future__ import annotations

import torch

from layerzero.backends.reference.attention import attention
from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """Equal keys give the mean of the values; a causal first row gives the first value."""
    query = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    value = torch.arange(8, dtype=torch.float64).reshape(1, 1, 2, 4)
    full = attention(query, query, value, None, 0.0, False, None, None, None, None, False)
    causal = attention(query, query, value, None, 0.0, True, None, None, None, None, False)
    assert isinstance(full, torch.Tensor) and isinstance(causal, torch.Tensor)
    error = max(
        (full - value.mean(2, keepdim=True)).abs().max().item(), (causal[:, :, 0] - value[:, :, 0]).abs().max().item()
    )
    return HealthReport("reference", error < 1e-12, f"attention with known answers, error {error:.1e}", error)
