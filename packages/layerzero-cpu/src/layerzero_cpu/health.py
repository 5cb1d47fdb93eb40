"""Known answers for the CPU kernels."""

from __future__ import annotations

import torch

from layerzero.plugin import HealthReport

__all__ = ["self_test"]


def self_test() -> HealthReport:
    """A norm, an activation, a rotation, a draw and codes whose answers are known in closed form."""
    from layerzero_cpu.gated import silu_and_mul
    from layerzero_cpu.library import native
    from layerzero_cpu.norm import rms_norm
    from layerzero_cpu.rotary import rope
    from layerzero_cpu.sampling import sample_topk

    norm = rms_norm(torch.tensor([[3.0, 4.0]]), None, 0.0)
    gated = silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 0.25]]))
    quarter = torch.zeros(1, 1), torch.ones(1, 1)  # cos and sin of a right angle
    turned = rope(torch.tensor([[[[1.0, 2.0]]]]), None, *quarter, False, "BHSD", None, False)[0]
    drawn = sample_topk(torch.tensor([[0.0, 9.0, 1.0]]), 1, 1.0, None)
    error = max(
        (norm - torch.tensor([[3.0, 4.0]]) / 12.5**0.5).abs().max().item(),
        (gated - torch.tensor([[0.0, 25.0]])).abs().max().item(),
        (turned - torch.tensor([[[[-2.0, 1.0]]]])).abs().max().item(),
        float(abs(int(drawn[0]) - 1)),
    )
    detail = f"norm, activation, rotation and draw of known rows with {native.isa()}, error {error:.1e}"
    return HealthReport("cpu", error < 1e-5, detail, error)
