"""FlashAttention 4 on a GPU: whoever has the backward compiled for one length has it compiled for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_length_compiles_a_backward_of_its_own(is_causal: bool) -> None:
    interface: Any = pytest.importorskip("flash_attn.cute.interface", reason="flash-attn-4 is not installed")

    def step(length: int) -> None:
        q, k, v = (
            torch.randn(1, length, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        lz.attention(
            q, k, v, is_causal=is_causal, layout="BSHD", backend="flashattn4"
        ).sum().backward()  # fmt: skip
        torch.cuda.synchronize()

    def compiled() -> int:
        caches = (getattr(item, "compile_cache", None) for item in vars(interface).values())
        return sum(len(cache) for cache in caches if isinstance(cache, dict))

    lz.configure(jit="block")
    try:
        step(384)
        before = compiled()
        assert before
        for length in (1, 17, 100, 129, 512):
            step(length)
        assert compiled() == before
    finally:
        lz.reset()
