"""Known answers for xFormers' kernels; runs in a process where xFormers can be imported."""

from __future__ import annotations

import torch

from layerzero.plugin import HealthReport

_LIMIT = 2e-3


def self_test() -> HealthReport:
    """Equal keys give the mean of the values they may look at, whatever the kernel."""
    if not torch.cuda.is_available():
        return HealthReport("xformers", False, "no CUDA device to test on")
    from layerzero_xformers import kernels

    query = torch.ones(1, 16, 4, 64, device="cuda", dtype=torch.float16)
    key = torch.ones(1, 16, 2, 64, device="cuda", dtype=torch.float16)
    generator = torch.Generator("cuda").manual_seed(0)
    value = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.float16, generator=generator)
    whole = value.float().mean(1, keepdim=True)
    below = value.float().cumsum(1) / torch.arange(1, 17, device="cuda")[None, :, None, None]
    worst = 0.0
    for name, causal in (("flash", False), ("flash", True), ("cutlass", False), ("cutlass", True), ("splitk", False)):
        run = getattr(kernels, f"{name}_attention")
        out = run(query, key, value, None, 0.0, causal, None, None, None, None, False)
        expected = (below if causal else whole).repeat_interleave(2, dim=2).expand_as(out)
        worst = max(worst, (out.float() - expected).abs().max().item())
    return HealthReport("xformers", worst < _LIMIT, f"flash, cutlass, splitk on cuda, error {worst:.1e}", worst)
