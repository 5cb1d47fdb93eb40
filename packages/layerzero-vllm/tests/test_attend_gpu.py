"""Our ops read the pages that vLLM's writer fills on CUDA: token after token, each with its key and then its value."""

from __future__ import annotations

import pytest
import torch

from layerzero_vllm import attend
from layerzero_vllm.choice import LayerKind, Phase

pytestmark = pytest.mark.gpu
KIND = LayerKind("cuda", "bfloat16", 8, 2, 128, 16)


@pytest.mark.parametrize(
    "settings",
    [attend.Settings(0.09), attend.Settings(0.09, window=70), attend.Settings(0.09, softcap=30.0)],
    ids=["plain", "window", "softcap"],
)
@pytest.mark.parametrize(
    "phase", [Phase("decode", 4, 1, 200), Phase("prefill", 2, 130, 130), Phase("chunked prefill", 2, 33, 300)], ids=str
)
def test_a_step_reads_vllms_pages(phase, settings):
    drawn = attend.example(KIND, phase, torch.bfloat16)
    # [blocks, kv heads, page, 2 * head_dim] as vLLM shows it, tokens one after another in memory
    pages, heads, page, twice = drawn.cache.shape
    cache = torch.empty(pages, page, heads, twice, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    keys, values = attend.interleaved(cache)
    block, offset = drawn.slots // page, drawn.slots % page
    keys[block, :, offset], values[block, :, offset] = drawn.keys, drawn.values
    batch = attend.batch_of(drawn.block_table, drawn.seq_lens, drawn.query_start_loc)
    found = attend.attend(drawn.query, (keys, values), batch, settings)

    tokens, new = phase.context, phase.query
    for row in range(phase.batch):
        k, v = (part[row * tokens : (row + 1) * tokens].double() for part in (drawn.keys, drawn.values))
        q = drawn.query[row * new : (row + 1) * new].double()
        k, v = (part.repeat_interleave(4, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * settings.scale
        if settings.softcap:
            scores = settings.softcap * torch.tanh(scores / settings.softcap)
        behind = torch.arange(tokens - new, tokens, device="cuda")[:, None] - torch.arange(tokens, device="cuda")
        hidden = (behind < 0) | (behind >= (settings.window or tokens))
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(found[row * new : (row + 1) * new].double(), expected, rtol=2e-2, atol=2e-2)
