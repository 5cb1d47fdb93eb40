"""Latent attention by our own kernel, for each instruction set of this processor, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero_cpu.library import native


@pytest.mark.parametrize("isa", native.isas_here())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dims", "context"), [(3, (40, 24), (5, 0, 37)), (128, (512, 64), (1, 700))])
def test_latent_decode(
    isa: str, dtype: torch.dtype, heads: int, dims: tuple[int, int], context: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    page, count = 16, len(context)
    blocks = -(-max(context) // page)
    queries = [torch.randn(count, heads, dim, generator=generator).to(dtype) for dim in dims]
    caches = [torch.randn(count * blocks, page, dim, generator=generator).to(dtype) for dim in dims]
    table = torch.randperm(count * blocks, generator=generator).view(count, blocks).int()
    batch = lz.paged_batch(table, torch.tensor(context, dtype=torch.int32))
    before = native.isa()
    native.set_isa(isa)
    try:
        found = lz.ops.mla_paged_attention(*queries, *caches, batch, scale=0.1, return_lse=True, backend="cpu")
    finally:
        native.set_isa(before)
    for row, length in enumerate(context):
        latent, rotated = (cache[table[row].long()].flatten(0, 1)[:length].double() for cache in caches)
        scores = (queries[0][row].double() @ latent.T + queries[1][row].double() @ rotated.T) * 0.1
        wanted = (scores.softmax(-1) @ latent, scores.logsumexp(-1)) if length else (torch.zeros(heads, dims[0]), None)
        bound = {"atol": 2e-5, "rtol": 2e-5} if dtype is torch.float32 else {"atol": 0.01, "rtol": 0.01}
        torch.testing.assert_close(found[0][row].float(), wanted[0].float(), **bound)
        if wanted[1] is not None:
            torch.testing.assert_close(found[1][row], wanted[1].float(), atol=2e-4, rtol=1e-5)
