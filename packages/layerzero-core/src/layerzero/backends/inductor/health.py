"""Known answers for the programs as written."""

from __future__ import annotations

import torch

from layerzero.backends.inductor.kernels import PROGRAMS
from layerzero.plugin import HealthReport


def self_test() -> HealthReport:
    """RMSNorm of a row whose answer is known, and a quarter turn."""
    row = torch.tensor([[3.0, 4.0]])
    norm = PROGRAMS["rms_norm"](row, torch.ones(2), torch.tensor(0.0)) - row / 12.5**0.5
    turn = PROGRAMS["rope"](row[None, :, None], torch.zeros(1, 1), torch.ones(1, 1)) - torch.tensor([-4.0, 3.0])
    error = max(norm.abs().max().item(), turn.abs().max().item())
    return HealthReport("inductor", error < 1e-6, f"programs on known rows, error {error:.1e}", error)
