"""Known answers for the Triton kernels, on the GPU, or on the CPU where Triton interprets."""

from __future__ import annotations

import torch

from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """RMSNorm, SiLU·mul and a draw whose answers are known in closed form."""
    from layerzero_triton.activation import silu_and_mul
    from layerzero_triton.kernels.launch import interpreting
    from layerzero_triton.norm import rms_norm
    from layerzero_triton.sampling import sample_topk

    if not torch.cuda.is_available() and not interpreting():
        return HealthReport("triton", False, "no GPU here, and TRITON_INTERPRET is not set")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    norm = rms_norm(torch.tensor([[3.0, 4.0]], device=device), None, 0.0)
    gated = silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 0.25]], device=device))
    drawn = sample_topk(torch.tensor([[0.0, 9.0, 1.0]], device=device), 1, 1.0, None)
    error = max(
        (norm - torch.tensor([[3.0, 4.0]], device=device) / 12.5**0.5).abs().max().item(),
        (gated - torch.tensor([[0.0, 25.0]], device=device)).abs().max().item(),
        float(abs(int(drawn[0]) - 1)),
    )
    return HealthReport("triton", error < 1e-5, f"norm, activation and draw of known rows, error {error:.1e}", error)
