"""The fixtures and helpers that tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.reference.attention import attention as reference
from layerzero_verify.testing.fixtures import (  # noqa: F401
    assert_like,
    cuda_device,
    device,
    kept_state,
    reset_cuda_state,
    sample_tensors,
)

Draw = Callable[..., tuple[Any, Any, Any]]


@pytest.mark.req("R-INFRA-02", "R-INFRA-03", "R-INFRA-04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "seq_len", "head_dim"), [(1, 1, 16), (2, 33, 64), (3, 8, 128)])
def test_attention_is_the_reference_over_dtypes_batches_lengths_and_head_dims(
    sample_tensors: Draw,  # noqa: F811
    dtype: torch.dtype,
    batch: int,
    seq_len: int,
    head_dim: int,
) -> None:
    q, k, v = sample_tensors(batch, 4, seq_len, head_dim, dtype=dtype)
    want = reference(*(t.double() for t in (q, k, v)), None, 0.0, False, None, None, None, None, False)
    assert_like(lz.attention(q, k, v), want)
    with pytest.raises(AssertionError):
        assert_like(lz.attention(q, k, v) + 0.1, want)


# An error that the table allows attention in that dtype, and one that it does not.
ERRORS = {torch.float64: (1e-9, 1e-4), torch.float32: (1e-6, 1e-4), torch.float16: (1e-3, 4e-3),
          torch.bfloat16: (1e-2, 4e-2)}  # fmt: skip


@pytest.mark.req("R-INFRA-03")
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_how_close_a_result_must_be_follows_from_its_dtype(dtype: torch.dtype) -> None:
    want = torch.linspace(-1.0, 1.0, 65, dtype=torch.float64)
    allowed, beyond = ERRORS[dtype]
    assert_like((want + allowed * want.sign()).to(dtype), want)
    with pytest.raises(AssertionError):
        assert_like((want + beyond).to(dtype), want)


@pytest.mark.req("R-INFRA-02")
def test_the_same_sizes_give_the_same_tensors_on_the_best_device(sample_tensors: Draw, device: torch.device) -> None:  # noqa: F811
    one, two = sample_tensors(1, 2, 3, 8), sample_tensors(1, 2, 3, 8)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) and one[0].device.type == device.type
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert sample_tensors(1, 4, 3, 8, kv_heads=2)[1].shape == (1, 2, 3, 8)


@pytest.mark.req("R-INFRA-02")
def test_flags_are_as_they_were_afterwards_whatever_happened(reset_cuda_state: None) -> None:  # noqa: F811
    before = torch.get_float32_matmul_precision()

    def changes() -> None:
        with kept_state():
            torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
            raise KeyError

    with pytest.raises(KeyError):
        changes()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.req("R-INFRA-02")
def test_a_gpu_is_given_where_there_is_one(cuda_device: torch.device) -> None:  # noqa: F811
    assert torch.ones(1, device=cuda_device).is_cuda
