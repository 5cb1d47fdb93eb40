"""Fixtures for tests of kernels and of programs that use them; a conftest imports them from here by name.

`device` is the best device here, `cuda_device` skips without one, `reset_cuda_state` leaves no memory or flag behind,
`sample_tensors` draws the inputs of an attention call. `assert_like` compares with the tolerance of op and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.numerics import assert_close, tolerance


@pytest.fixture
def device() -> torch.device:
    """The first accelerator, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda_device() -> torch.device:
    """A CUDA or ROCm device; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def reset_cuda_state() -> Iterator[None]:
    """Flags and cached memory as they were: a test that changes them costs the next one nothing."""
    with kept_state():
        yield


@contextmanager
def kept_state() -> Iterator[None]:
    """The same around a block."""
    matmul = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        if torch.are_deterministic_algorithms_enabled() is not deterministic:  # setting it imports half of torch
            torch.use_deterministic_algorithms(deterministic)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def sample_tensors(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A function that draws query, key and value, the same ones each time for the same sizes."""

    def draw(
        batch: int = 2,
        heads: int = 4,
        seq_len: int = 16,
        head_dim: int = 32,
        *,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(hash((batch, heads, seq_len, head_dim)) % 2**31)
        shapes = [(batch, heads if n == 0 else kv_heads or heads, seq_len, head_dim) for n in range(3)]
        q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        return q, k, v

    return draw


def assert_like(actual: Any, expected: Tensor, op: str = "attention") -> None:
    """Compare with what a float64 or float32 computation gives; how close it must be follows from op and dtype."""
    assert_close(actual, expected, tolerance(op, str(actual.dtype).removeprefix("torch.")))
