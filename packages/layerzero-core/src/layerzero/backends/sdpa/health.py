"""Known answers for torch's attention kernels on the best device of this process."""

from __future__ import annotations

import torch

from layerzero.backends.sdpa import kernels
from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """Equal keys give the mean of the values, whatever the kernel."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    query = torch.ones(1, 2, 16, 64, device=device, dtype=dtype)
    value = torch.randn(1, 2, 16, 64, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    expected = value.float().mean(2, keepdim=True)
    names = ("flash_cuda", "efficient_cuda", "math") if cuda else ("flash_cpu", "math")
    worst = 0.0
    for name in names:
        out = getattr(kernels, name)(query, query, value, None, 0.0, False, None, None, None, None, False)
        worst = max(worst, (out.float() - expected).abs().max().item())
    limit = 2e-3 if cuda else 1e-5
    return HealthReport("sdpa", worst < limit, f"{', '.join(names)} on {device}, error {worst:.1e}", worst)
