"""xFormers' kernels in this process, on a GPU, against the reference in float64; skipped where xFormers is not.

Beside FlashAttention 4 or another CUDA, start the tests inside an enclosure, so that xFormers can be imported::

    python -c "from layerzero.plugin.enclosure import *; enter(Enclosure(('FOLDER',), ('flash_attn',)));
    import pytest; pytest.main(['-m', 'gpu', 'packages/layerzero-xformers/tests/test_gpu_kernels.py'])"
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from layerzero.backends.reference.attention import attention as reference
from layerzero.model.device import DeviceSpec
from layerzero.numerics import assert_close, tolerance
from layerzero_xformers.plugin import layerzero_capabilities

pytestmark = pytest.mark.gpu

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("xformers.ops", reason="xformers cannot be imported here", exc_type=ImportError)
    return importlib.import_module("layerzero_xformers.kernels")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def inputs(batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Any:
    return (
        randn(batch, q_len, heads, dim, dtype=dtype),
        randn(batch, k_len, kv_heads, dim, seed=1, dtype=dtype),
        randn(batch, k_len, kv_heads, dim, seed=2, dtype=dtype),
    )


def truth(q: Any, k: Any, v: Any, mask: Any, causal: Any, scale: Any, window: Any) -> Any:
    wide = (t.transpose(1, 2).double() for t in (q, k, v))
    bias = mask.double() if mask is not None and mask.dtype is not torch.bool else mask
    out, lse = reference(*wide, bias, 0.0, causal, scale, window, None, None, True)
    return out.transpose(1, 2), lse


CASES = {
    "prefill": ((1, 512, 512, 8, 2, 128, BF16), "bottom_right", None, None),
    "prefill_d64_mha": ((2, 300, 300, 4, 4, 64, HALF), "bottom_right", None, None),
    "prefill_d256_mqa": ((1, 257, 257, 4, 1, 256, BF16), "bottom_right", None, None),
    "d96_full": ((1, 130, 200, 6, 2, 96, HALF), False, None, None),
    "decode": ((4, 1, 1000, 8, 2, 128, BF16), "bottom_right", None, None),
    "more_queries_than_keys": ((2, 96, 40, 4, 2, 64, HALF), "bottom_right", None, None),
    "window": ((1, 200, 333, 4, 2, 64, HALF), False, None, (16, 5)),
    "window_left": ((1, 200, 333, 4, 4, 64, HALF), False, None, (16, -1)),
    "window_causal": ((1, 300, 300, 4, 2, 128, BF16), "bottom_right", None, (64, 0)),
    "window_causal_longer": ((1, 100, 300, 4, 2, 128, BF16), "bottom_right", None, (64, -1)),
    "top_left_longer": ((1, 100, 300, 4, 2, 64, HALF), True, None, None),
    "top_left_last_row_alone": ((1, 65, 300, 4, 2, 64, HALF), True, None, None),
    "top_left_one_row": ((1, 1, 300, 4, 2, 64, HALF), True, None, None),
    "negative_scale": ((1, 64, 64, 4, 2, 64, HALF), "bottom_right", -0.25, None),
    "zero_scale": ((1, 64, 64, 4, 2, 64, HALF), "bottom_right", 0.0, None),
    "full_precision": ((2, 100, 129, 4, 2, 64, FULL), "bottom_right", None, None),
}
TAKES = {
    "flash": {case for case in CASES if not case.startswith("top_left")} - {"full_precision"},
    "cutlass": set(CASES) - {"window", "window_left", "more_queries_than_keys"},
    "splitk": {"decode"},
}


@pytest.mark.req("R-BK-XF-01")
def test_every_kernel_that_is_offered_is_available_by_the_word_of_xformers_info(kernels: Any) -> None:
    features = importlib.import_module("xformers.info").get_features_status()
    operators = {"flash": kernels._FLASH, "cutlass": kernels._CUTLASS, "splitk": kernels._SPLITK}
    status = layerzero_capabilities(DeviceSpec.detect("cuda"))
    assert status.available and status.kernels, status
    for name in status.kernels:
        forward, _ = operators[name.rpartition(".")[2]]
        assert features[f"memory_efficient_attention.{forward.NAME}"] == "available", name


@pytest.mark.req("R-BK-XF-02")
@pytest.mark.req("R-BK-XF-04")
@pytest.mark.req("R-BK-XF-05")
@pytest.mark.parametrize(("name", "case"), [(name, case) for name in TAKES for case in CASES if case in TAKES[name]])
def test_forward_and_lse_match_the_reference(kernels: Any, name: str, case: str) -> None:
    sizes, causal, scale, window = CASES[case]
    q, k, v = inputs(*sizes)
    expected, expected_lse = truth(q, k, v, None, causal, scale, window)
    run = getattr(kernels, f"{name}_attention")
    out = run(q, k, v, None, 0.0, causal, scale, window, None, None, False)
    assert_close(out, expected.to(out.dtype), tolerance("attention", out.dtype))
    again, lse = run(q, k, v, None, 0.0, causal, scale, window, None, None, True)
    assert_close(again, expected.to(out.dtype), tolerance("attention", out.dtype))
    assert lse.shape == expected_lse.shape and lse.dtype is torch.float32
    assert_close(lse, expected_lse.float(), tolerance("attention", out.dtype))


MASKS = {
    "bool_one_for_all": ((1, 1, 65, 130), torch.bool),
    "bool_per_batch": ((2, 1, 65, 130), torch.bool),
    "float_rows_alike": ((2, 4, 1, 130), HALF),
    "float_matrix": ((65, 130), HALF),
    "float32_beside_half": ((2, 4, 65, 130), FULL),
    "odd_length": ((1, 4, 65, 127), HALF),
}


@pytest.mark.req("R-BK-XF-03")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_expanded_for_it(kernels: Any, mask: str, causal: Any, heads: tuple[int, int]) -> None:
    shape, dtype = MASKS[mask]
    q, k, v = inputs(2, 65, shape[-1], *heads, 64, HALF)
    drawn = randn(*shape, seed=3, dtype=FULL)
    given = drawn > -0.5 if dtype is torch.bool else drawn.to(dtype)
    expected, _ = truth(q, k, v, given, causal, None, None)
    out = kernels.cutlass_attention(q, k, v, given, 0.0, causal, None, None, None, None, False)
    assert_close(out, expected.to(HALF), tolerance("attention", HALF))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("name", ["flash", "cutlass"])
def test_gradients_match_the_reference(kernels: Any, name: str, causal: Any, heads: tuple[int, int]) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, 96, 128, *heads, 64, HALF))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    grad = randn(2, 96, 4, 64, seed=9)
    run = getattr(kernels, f"{name}_attention")
    run(q, k, v, None, 0.0, causal, None, None, None, None, False).backward(grad)
    out = reference(*(t.transpose(1, 2) for t in wide), None, 0.0, causal, None, None, None, None, False)
    out.transpose(1, 2).backward(grad.double())
    for mine, true in zip((q, k, v), wide, strict=True):
        bound = 4e-3 * max(1.0, true.grad.abs().max().item())  # half precision through two products
        assert (mine.grad.double() - true.grad).abs().max().item() < bound
