"""One small call of every differentiable public op: what torch's transforms and tracers are tried on.

`calls()` gives (name, function of the differentiable inputs, those inputs). Inputs are float32 unless said.
"""

from __future__ import annotations

import torch

import layerzero as lz


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def tables(seq, half):
    theta = torch.arange(float(seq))[:, None] * torch.logspace(0, -2, half)
    return theta.cos(), theta.sin()


def calls():
    """(name, function, inputs), each built anew."""
    x, residual, gain, bias = rand(3, 4, 8), rand(3, 4, 8, seed=1), rand(8), rand(8, seed=1)
    q, k, v = rand(2, 4, 5, 8), rand(2, 4, 5, 8, seed=1), rand(2, 4, 5, 8, seed=2)
    few_k, few_v = k[:, :2].contiguous(), v[:, :2].contiguous()
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    cos, sin = tables(5, 4)
    ids = torch.tensor([[0, 3], [2, 2]])
    labels = torch.tensor([1, 0, 6])
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed_q, packed_k, packed_v = rand(5, 4, 8), rand(5, 4, 8, seed=1), rand(5, 4, 8, seed=2)
    pages = lz.paged_batch(
        torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32),
        query_lens=torch.tensor([2, 1], dtype=torch.int32), host_lens=([7, 4], [2, 1]),
    )  # fmt: skip
    groups = lz.grouped_batch(offsets, torch.tensor([0, 6], dtype=torch.int32), torch.tensor([[3], [6]]))
    sizes, chosen = torch.tensor([3, 0, 2]), torch.tensor([[0, 1], [1, 2], [2, 0]])
    return [
        ("rms_norm", lambda x, w: lz.rms_norm(x, w), (x, gain)),
        ("rms_norm without a weight", lambda x: lz.rms_norm(x), (x,)),
        ("add_rms_norm", lambda x, r, w: lz.add_rms_norm(x, r, w), (x, residual, gain)),
        ("layer_norm", lambda x, w, b: lz.layer_norm(x, w, b), (x, gain, bias)),
        ("gemma_rms_norm", lambda x, w: lz.gemma_rms_norm(x, w), (x, gain)),
        ("gemma_add_rms_norm", lambda x, r, w: lz.gemma_add_rms_norm(x, r, w), (x, residual, gain)),
        ("silu_and_mul", lambda x: lz.silu_and_mul(x), (x,)),
        ("gelu_and_mul", lambda x: lz.gelu_and_mul(x), (x,)),
        ("relu_and_mul", lambda x: lz.relu_and_mul(x), (x,)),
        ("rope", lambda q, k: lz.rope(q, k, cos, sin), (q, k)),
        ("rope of tables", lambda q, c, s: lz.rope(q, None, c, s, interleaved=True)[0], (q, cos, sin)),
        ("xpos", lambda q, k: lz.xpos(q, k, cos, sin), (q, k)),
        ("linear", lambda x, w, b: lz.linear(x, w, b), (x, rand(6, 8), rand(6))),
        ("linear with an activation", lambda x, w: lz.linear(x, w, None, "gelu"), (x, rand(6, 8))),
        ("embedding", lambda w: lz.embedding(ids, w), (rand(5, 8),)),
        ("cross_entropy", lambda x: lz.cross_entropy(x, labels), (rand(3, 7),)),
        ("mlp", lambda x, u, d, g: lz.mlp(x, u, d, g), (x, rand(6, 8), rand(8, 6), rand(6, 8, seed=1))),
        ("moe", lambda x, u, d, w: lz.moe(x, u, d, w, chosen), (rand(3, 8), rand(3, 8, 8), rand(3, 8, 4), rand(3, 2))),
        ("topk_gate", lambda x: lz.topk_gate(x, 2)[0], (rand(3, 7),)),
        ("grouped_gemm", lambda x, w: lz.grouped_gemm(x, w, sizes), (rand(5, 8), rand(3, 6, 8))),
        ("cast", lambda x: lz.cast(x, torch.float64), (x,)),
        ("sampling_probs", lambda x: lz.sampling_probs(x, temperature=0.7), (rand(3, 7),)),
        ("attention", lambda q, k, v: lz.attention(q, k, v), (q, k, v)),
        ("causal attention", lambda q, k, v: lz.attention(q, k, v, is_causal=True), (q, few_k, few_v)),
        ("masked attention", lambda q, k, v: lz.attention(q, k, v, mask, scale=0.3), (q, k, v)),
        ("attention in a window", lambda q, k, v: lz.attention(q, k, v, window=2, softcap=5.0), (q, k, v)),
        ("attention, BSHD", lambda q, k, v: lz.attention(q, k, v, layout="BSHD"), (q, k, v)),
        ("attention with its lse", lambda q, k, v: lz.attention(q, k, v, return_lse=True), (q, k, v)),
        ("varlen_attention", lambda q, k, v: lz.varlen_attention(q, k, v, offsets, offsets, max_seqlen_q=3,
                                                                 max_seqlen_k=3), (packed_q, packed_k, packed_v)),
        ("paged_attention", lambda q, k, v: lz.paged_attention(q, k, v, pages),
         (rand(3, 4, 8), rand(4, 4, 2, 8), rand(4, 4, 2, 8, seed=1))),
        ("mla_paged_attention", lambda q, p, c, r: lz.mla_paged_attention(q, p, c, r, pages, scale=0.2),
         (rand(3, 2, 8), rand(3, 2, 4), rand(4, 4, 8), rand(4, 4, 4))),
        ("grouped_attention", lambda q, k, v: lz.grouped_attention(q, k, v, groups),
         (packed_q, rand(6, 4, 8), rand(6, 4, 8, seed=1))),
    ]  # fmt: skip


def results(out):
    """The floating results of a call, as a tuple."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(item for item in outs if item is not None and item.is_floating_point())
