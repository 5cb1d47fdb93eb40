"""Decode three sequences of different length over one paged KV cache.

The batch is planned once per step with `lz.paged_batch` and then serves every layer.
Run it: python examples/paged_decode.py
"""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.runtime.state import state

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 8, 2, 64, 16
STEPS = 40
lengths = [5, 17, 30]

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

pages_each = (max(lengths) + STEPS) // PAGE + 1
pages = len(lengths) * pages_each
# Page numbers in any order: row b lists the pages of sequence b.
block_tables = torch.randperm(pages, device=device).to(torch.int32).view(len(lengths), pages_each)
key_cache = torch.randn(LAYERS, pages, PAGE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
value_cache = torch.randn_like(key_cache)

for step in range(STEPS):
    if step == 1:  # in the first one the kernel is chosen, and where it bears no proof, checked
        before = state.counters.selections
    lengths = [length + 1 for length in lengths]
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    # The lengths are known here as Python numbers; handing them over spares a copy from the device.
    batch = lz.paged_batch(block_tables, context_lens, host_lens=lengths)
    for layer in range(LAYERS):
        query = torch.randn(len(lengths), HEADS, HEAD_DIM, device=device, dtype=dtype)
        for row, length in enumerate(lengths):
            page, slot = block_tables[row, (length - 1) // PAGE], (length - 1) % PAGE
            key_cache[layer, page, slot] = torch.randn(KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
            value_cache[layer, page, slot] = torch.randn(KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
        out = lz.paged_attention(query, key_cache[layer], value_cache[layer], batch)

print("last step:", tuple(out.shape), "contexts", lengths)
print("kernel:", lz.explain("paged_attention", query, key_cache[-1], value_cache[-1], batch).ran)
print(f"{(STEPS - 1) * LAYERS} more calls, {state.counters.selections - before} selections")
