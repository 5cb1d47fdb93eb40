"""Every adapter compiles where warnings are errors: in each of these, the filter stands in front of ours."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerzero.model.grouped import make_grouped_batch
from layerzero.model.kv_cache import make_paged_batch

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ADAPTERS = ["attention", "softcap", "backward", "varlen", "varlen_backward", "decode", "prefill", "grouped"]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16).requires_grad_(grad)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


def call(adapter: str) -> Any:
    """As many heads for keys as for queries in bfloat16, as no other test has it, so that each of these compiles."""
    fa4: Any = importlib.import_module("layerzero_flashattn.fa4.kernels")
    grad = adapter.endswith("backward")
    if adapter in ("attention", "softcap", "backward"):
        q, k, v = (randn(1, 64, 2, 64, grad=grad) for _ in range(3))
        cap = 20.0 if adapter == "softcap" else None
        return fa4.attention(q, k, v, None, 0.0, "bottom_right", None, None, cap, None, False)
    q, k, v = (randn(64, 2, 64, grad=grad) for _ in range(3))
    if adapter.startswith("varlen"):
        ends = ints(0, 20, 64)
        return fa4.varlen_attention(q, k, v, ends, ends, 44, 44, "bottom_right", None, None, None, None, False)
    if adapter == "grouped":
        grouped: Any = importlib.import_module("layerzero_flashattn.fa4.grouped")
        batch = make_grouped_batch(ints(0, 30, 64), ints(0, 64), ints(32, 64).view(2, 1))
        return grouped.grouped_attention(q, k, v, batch, True, None, False)
    paged: Any = importlib.import_module("layerzero_flashattn.fa4.paged")
    tables, lens = ints(0, 1, 2, 3).view(2, 2), ints(20, 30)
    queries = ints(4, 5) if adapter == "prefill" else None
    batch = make_paged_batch(tables, lens, queries)
    pages = [randn(4, 16, 2, 64) for _ in range(2)]
    run = paged.paged_prefill if adapter == "prefill" else paged.paged_decode
    return run(randn(batch.total_q, 2, 64), *pages, batch, None, None, None, None, False, "NHD")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_flash_attention_4(adapter: str) -> None:
    pytest.importorskip("flash_attn.cute.interface", reason="flash-attn-4 is not installed")
    out = call(adapter)
    if adapter.endswith("backward"):
        warnings.simplefilter("error")  # in front of what the forward has left
        out.sum().backward()
    assert out.isfinite().all()


@pytest.mark.parametrize("adapter", ["rms_norm", "add_rms_norm", "layer_norm", "rope", "cross_entropy"])
def test_quack(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    monkeypatch.setattr("quack.cache.CACHE_ENABLED", False)  # what lies on disk is not compiled again
    module = {"rope": "rotary", "cross_entropy": "loss"}.get(adapter, "norm")
    run = getattr(importlib.import_module(f"layerzero_flashattn.quack.{module}"), adapter)
    x, weight = randn(6, 1280, grad=True), randn(1280, grad=True)
    if adapter == "rope":
        cos, sin = randn(6, 32), randn(6, 32)
        found = run(randn(1, 6, 2, 64, grad=True), None, cos, sin, False, "BSHD", None, False)[0]
    elif adapter == "cross_entropy":
        found = run(x, torch.arange(6, device="cuda"), -100, None, None, None, "mean", False)
    else:
        rest = {"rms_norm": (weight,), "add_rms_norm": (randn(6, 1280), weight), "layer_norm": (weight, weight)}
        found = run(x, *rest[adapter], 1e-6)
    out = found[0] if isinstance(found, tuple) else found
    warnings.simplefilter("error")
    out.float().sum().backward()
    assert out.isfinite().all()
