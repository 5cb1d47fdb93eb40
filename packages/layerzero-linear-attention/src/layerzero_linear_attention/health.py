"""Known answers for the CPU kernels."""

from __future__ import annotations

import torch

from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """A value written under a key is read back; a step of one adds x; a kernel of ones sums the past."""
    from layerzero_linear_attention.cpu import causal_conv1d, gated_delta_rule, mamba2_scan

    one = torch.ones(1, 1, 1)
    key, value = torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[[[3.0, -4.0]]]])
    held, _ = gated_delta_rule(key, key, value, 0 * one, one, None, None, 1.0, False)
    read, _ = mamba2_scan(value, one, torch.zeros(1), key, key, None, None, None, None, False, 0.0, None)
    summed, _ = causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 3), None, None, None, None)
    error = max(
        (held - value).abs().max().item(),
        (read - value).abs().max().item(),
        (summed - torch.tensor([[[1.0, 3.0, 6.0]]])).abs().max().item(),
    )
    detail = f"a delta rule, a scan and a convolution of known numbers, error {error:.1e}"
    return HealthReport("linear_attention", error < 1e-5, detail, error)
