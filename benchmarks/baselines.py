"""The 34 cases of the H200 page: their torch baselines, and what was measured with them on 2026-11-15.

The baselines themselves, as code, are `layerzero_tune.timing.baselines` (so that `lz bench` has them, too):

- attention: `F.scaled_dot_product_attention(q, k, v, is_causal, enable_gqa)` on transposed views of contiguous BSHD
- RMSNorm: `F.rms_norm(x, (N,), w, 1e-6)`; add + RMSNorm: `F.rms_norm(x + r, (N,), w, 1e-6)`
- SiLU·mul: `F.silu(x[:, :h]) * x[:, h:]`, h = 14336
- RoPE: rotate-half, out of place, for q (32 heads) and k (8 heads), D = 128, cos and sin bf16 broadcast over heads
- top-k 50 + top-p 0.9: from probabilities, full descending sort, cumulative sum, mask, `torch.multinomial`, gather
- paged decode, page 16, NHD: gather the pages by block table, reshape, SDPA

Medians there came from Triton's do_bench; `layerzero_tune.timing.clock.cuda_clock` times the same way, interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerzero_tune.timing.baselines import torch_default

__all__ = ["RECORDED", "torch_default"]

# case -> (torch default, best library), µs, as measured on the H200 on 2026-11-15
RECORDED: Mapping[str, tuple[float, float]] = {
    "prefill B1 Sq512 Sk512 causal1": (15.73, 15.1),
    "prefill B1 Sq2048 Sk2048 causal1": (86.46, 67.9),
    "prefill B1 Sq8192 Sk8192 causal1": (1027.09, 887.94),
    "prefill B8 Sq2048 Sk2048 causal1": (545.78, 541.38),
    "prefill B4 Sq1024 Sk1024 causal0": (118.88, 118.88),
    "decode B1 Sq1 Sk4096 causal0": (16.8, 16.26),
    "decode B16 Sq1 Sk4096 causal0": (75.36, 75.36),
    "decode B64 Sq1 Sk2048 causal0": (135.82, 135.82),
    "decode B1 Sq1 Sk32768 causal0": (49.57, 49.38),
    "rmsnorm 1x4096": (10.43, 5.12),
    "rmsnorm 16x4096": (10.66, 5.15),
    "rmsnorm 4096x4096": (27.42, 23.2),
    "rmsnorm 16384x8192": (203.23, 134.5),
    "attn B1 Sq1024 Sk1024 H32/8 D128 c1": (34.69, 34.37),
    "attn B4 Sq4096 Sk4096 H32/8 D128 c1": (918.48, 918.48),
    "attn B1 Sq16384 Sk16384 H32/8 D128 c1": (3901.98, 3459.31),
    "attn B1 Sq4096 Sk4096 H16/16 D64 c1": (108.0, 106.66),
    "attn B2 Sq4096 Sk4096 H16/16 D64 c0": (292.03, 282.59),
    "attn B1 Sq4096 Sk4096 H8/8 D256 c1": (167.14, 146.13),
    "attn B32 Sq128 Sk128 H12/12 D64 c0": (15.14, 15.14),
    "attn B1 Sq128 Sk8192 H32/8 D128 c0": (100.51, 68.06),
    "paged_decode B16 Sk4096": (519.71, 83.23),
    "paged_decode B64 Sk2048": (1022.75, 143.14),
    "add_rmsnorm 16": (11.23, 5.41),
    "silu_mul 16": (11.55, 6.72),
    "rope 16": (202.62, 5.6),
    "add_rmsnorm 4096": (52.61, 37.54),
    "silu_mul 4096": (314.16, 88.1),
    "rope 4096": (202.75, 30.98),
    "add_rmsnorm 16384": (179.23, 135.55),
    "silu_mul 16384": (1220.18, 329.14),
    "rope 16384": (694.98, 100.16),
    "topk_topp B1": (419.6, 68.48),
    "topk_topp B64": (1089.5, 161.95),
}
