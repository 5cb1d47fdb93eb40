"""Attention in two lines, and the reason for the choice.

Run it: python examples/quickstart.py
"""

from __future__ import annotations

import torch

import layerzero as lz

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

# 8 query heads share 2 key/value heads: GQA follows from the shapes.
q = torch.randn(1, 8, 128, 64, device=device, dtype=dtype)
k = torch.randn(1, 2, 128, 64, device=device, dtype=dtype)
v = torch.randn(1, 2, 128, 64, device=device, dtype=dtype)

# A drop-in for F.scaled_dot_product_attention.
out = lz.attention(q, k, v, is_causal=True)
print("attention:", tuple(out.shape), out.dtype)

# Which kernel was it, and why not another? The report is the very decision that ran.
report = lz.explain("attention", q, k, v, is_causal=True)
print("ran:", report.ran)
print(report)

# A gradient changes what a kernel must be able to do; the choice follows.
q.requires_grad_()
print("with gradient:", lz.which("attention", q, k, v, is_causal=True))

# Bound once, called many times, without any lookup.
q = q.detach()
plan = lz.plan("attention", q, k, v, is_causal=True)
assert torch.equal(plan(q, k, v), lz.attention(q, k, v, is_causal=True))
print("plan:", plan.kernel_id)  # type: ignore[attr-defined]
