"""Known answers: a call whose result can be told without computing attention or a norm."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.plugin import HealthReport

_LIMIT = {"flashattn2": 2e-3, "flashattn3": 2e-3, "flashattn4": 2e-3, "quack": 2e-3}


def self_test(backend: str) -> HealthReport:
    """Run the known-answer test of one backend on the current GPU."""
    if backend not in _LIMIT:
        return HealthReport(backend, False, "no such backend in this package")
    if not torch.cuda.is_available():
        return HealthReport(backend, False, "needs a CUDA device, and torch sees none")
    test: Callable[[], tuple[str, float]] = _norms if backend == "quack" else lambda: _equal_keys(backend)
    try:
        what, worst = test()
    except Exception as error:
        return HealthReport(backend, False, f"{type(error).__name__}: {error}"[:400])
    limit = _LIMIT[backend]
    return HealthReport(backend, worst < limit, f"{what} on {torch.cuda.get_device_name()}, error {worst:.1e}", worst)


def _equal_keys(backend: str) -> tuple[str, float]:
    """Equal keys give the mean of the values each query may see: under a causal mask the last all, the first its own.

    One kernel, since FlashAttention 4 compiles each for many seconds.
    """
    kernels: Any = importlib.import_module(f"layerzero_flashattn.fa{backend[-1]}.kernels")
    ones = torch.ones(1, 16, 2, 64, device="cuda", dtype=torch.float16)
    value = _random(1, 16, 2, 64)
    masked, lse = kernels.attention(ones, ones, value, None, 0.0, "bottom_right", None, None, None, None, True)
    counts = torch.arange(1, 17, device="cuda", dtype=torch.float32)
    means = value.float().cumsum(1) / counts[:, None, None]
    return "causal attention and its log-sum-exp", max(
        _error(masked, means),
        _error(lse, counts.log() + 8.0),  # the score of ones over 64 dims, scaled by 1/8
    )


def _norms() -> tuple[str, float]:
    """Rows of +-c have a root mean square of c, whatever c is."""
    norm: Any = importlib.import_module("layerzero_flashattn.quack.norm")
    signs = _random(8, 256).sign()
    rows = signs * torch.arange(1, 9, device="cuda", dtype=torch.float16)[:, None]
    weight = torch.full((256,), 0.5, device="cuda", dtype=torch.float16)
    plain = norm.rms_norm(rows, weight, 0.0)
    added, stream = norm.add_rms_norm(rows, rows, weight, 0.0)
    return "rms_norm and add_rms_norm", max(
        _error(plain, 0.5 * signs), _error(added, 0.5 * signs), _error(stream, 2.0 * rows)
    )


def _random(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(*shape, device="cuda", dtype=torch.float16, generator=generator)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())
