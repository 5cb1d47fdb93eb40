"""Known answers, on the modules that are compiled already: a self test must not wait for a compiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerzero.plugin import HealthReport
from layerzero_flashinfer import elementwise, single
from layerzero_flashinfer.modules import specs_for

_LIMIT = 4e-3  # float16, values below 4


def self_test() -> HealthReport:
    """Equal keys give the mean of the values; a row of ones is its own norm; silu(0) is 0."""
    if not torch.cuda.is_available():
        return HealthReport("flashinfer", False, "no CUDA device")
    tried: list[str] = []
    worst = 0.0
    for name, shape, test in _TESTS:
        specs = specs_for({"dtype": "float16", "head_dim": 128, **shape})
        if specs and all(spec.is_compiled for spec in specs):
            tried.append(name)
            worst = max(worst, test())
    if not tried:
        return HealthReport("flashinfer", False, "nothing is compiled yet; `lz warmup` does it")
    return HealthReport("flashinfer", worst < _LIMIT, f"{', '.join(tried)}, error {worst:.1e}", worst)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max())


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16, generator=torch.Generator("cuda").manual_seed(0))


def _norm() -> float:
    return _error(elementwise.rms_norm(torch.ones(3, 256, device="cuda").half(), _draw(256), 0.0), _draw(256))


def _silu() -> float:
    x = _draw(4, 512)
    x[:, :256] = 0.0
    return _error(elementwise.silu_and_mul(x), torch.zeros(4, 256, device="cuda"))


def _attend(kernel: Callable[..., Tensor], rows: int) -> Callable[[], float]:
    def test() -> float:
        query, value = torch.ones(1, rows, 4, 128, device="cuda").half(), _draw(1, 32, 2, 128)
        key = torch.ones_like(value)
        out = kernel(query, key, value, None, 0.0, False, None, None, None, None, False)
        return _error(out, value.float().mean(1, keepdim=True).repeat_interleave(2, dim=2))

    return test


_TESTS: tuple[tuple[str, dict[str, object], Callable[[], float]], ...] = (
    ("rms_norm", {"op": "rms_norm"}, _norm),
    ("silu_and_mul", {"op": "silu_and_mul"}, _silu),
    ("single_decode_tc", {"op": "attention", "seq_len_q": 16}, _attend(single.decode_tc, 1)),
    ("single_fa2", {"op": "attention", "seq_len_q": 16}, _attend(single.prefill_fa2, 16)),
)
