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

    def compiled() -> dict[str, int]:
        """Kernels of the backward in the library's caches: dicts in some releases, objects around one in others."""
        caches = {
            f"{name}.{word}": cache
            for name, item in vars(interface).items()
            if "bwd" in name
            for word, cache in getattr(item, "__dict__", {}).items()
            if word.startswith("compile_cache")
        }
        return {name: len(getattr(cache, "cache", cache)) for name, cache in caches.items()}

    lz.configure(jit="block")
    try:
        step(384)
        before = compiled()
        assert sum(before.values()), f"no backward was compiled, or its cache is not found: {before}"
        for length in (1, 17, 100, 129, 512):
            step(length)
            assert compiled() == before, f"at length {length}"
    finally:
        lz.reset()
