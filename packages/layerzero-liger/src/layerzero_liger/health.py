"""Known answers for Liger's kernels on the current GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from layerzero.plugin import HealthReport

_LIMIT = 1e-5


def self_test() -> HealthReport:
    """Rows of +-c have a root mean square of c; SiLU and GELU of 0 give 0; equal logits cost log(classes)."""
    if not torch.cuda.is_available():
        return HealthReport("liger", False, "needs a GPU, and torch sees none")
    try:
        worst = max(error for error in _errors("cuda"))
    except Exception as error:
        return HealthReport("liger", False, f"{type(error).__name__}: {error}"[:400])
    what = "rms_norm, silu_and_mul, gelu_and_mul, rope, cross_entropy"
    return HealthReport("liger", worst < _LIMIT, f"{what} on {torch.cuda.get_device_name()}, error {worst:.1e}", worst)


def _errors(device: str) -> list[float]:
    norm, gated, rotary, loss = (
        importlib.import_module(f"layerzero_liger.{name}") for name in ("norm", "gated", "rotary", "loss")
    )
    signs = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).sign().to(device)
    rows = signs * torch.arange(1.0, 9.0, device=device)[:, None]
    packed = torch.cat((torch.zeros_like(rows), rows), dim=-1)
    # A quarter turn puts each pair's second element, negated, in the place of the first.
    heads = rows.view(1, 8, 2, 128)
    still, quarter = torch.zeros(8, 64, device=device), torch.ones(8, 64, device=device)
    turned = torch.cat((-heads[..., 64:], heads[..., :64]), dim=-1)
    classes = torch.full((4, 512), 3.0, device=device)
    labels = torch.arange(4, device=device)
    q, k = rotary.rope(heads, heads, still, quarter, False, "BSHD", None, False)
    return [
        _error(norm.rms_norm(rows, torch.ones(256, device=device), 0.0), signs),
        _error(gated.silu_and_mul(packed), torch.zeros_like(rows)),
        _error(gated.gelu_and_mul(packed, "tanh"), torch.zeros_like(rows)),
        _error(q, turned),
        _error(k, turned),
        _error(
            loss.cross_entropy(classes, labels, -100, None, None, None, "mean", False),
            torch.tensor(512.0, device=device).log(),
        ),
    ]


def _error(found: Any, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())
