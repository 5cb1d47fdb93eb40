"""Known answers for torch's fused functions."""

from __future__ import annotations

import torch

from layerzero.backends.torch_native.kernels import layer_norm, rms_norm
from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """RMSNorm and LayerNorm of rows whose answers are known in closed form."""
    rms = rms_norm(torch.tensor([[3.0, 4.0]], dtype=torch.float64), None, 0.0)
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64) / 12.5**0.5
    layer = layer_norm(torch.tensor([[1.0, 3.0]], dtype=torch.float64), None, None, 0.0)
    error = max(
        (rms - expected).abs().max().item(),
        (layer - torch.tensor([[-1.0, 1.0]], dtype=torch.float64)).abs().max().item(),
    )
    return HealthReport("torch", error < 1e-12, f"norms of known rows, error {error:.1e}", error)
