"""The reference can be traced by torch.compile into one graph, and the graph computes the same numbers."""

from __future__ import annotations

import torch

from layerzero.backends.reference.feed_forward import embedding, gelu_and_mul, linear, relu_and_mul, silu_and_mul
from layerzero.backends.reference.norm import add_rms_norm, layer_norm, rms_norm
from layerzero.backends.reference.positional import rope


def block(ids, table, weight, cos, sin):
    """A chain through every op, so that one compilation covers them all."""
    x = embedding(ids, table, 0)
    x = rms_norm(x, weight, 1e-6)
    y, residual = add_rms_norm(x, x, weight, 1e-6)
    y = layer_norm(y, weight, None, 1e-5)
    heads = y.unflatten(-1, (2, 8)).transpose(1, 2)
    q, _ = rope(heads, None, cos, sin, False, "BHSD", None, False)
    q, k = rope(q, heads, cos, sin, True, "BHSD", torch.arange(5), False)
    wide = torch.cat((q, k), dim=-1)
    gated = silu_and_mul(wide) + gelu_and_mul(wide, "tanh") + relu_and_mul(wide)
    return linear(gated, table[:, :8], None, "gelu"), residual


def test_every_op_is_traceable_in_one_graph():
    gen = torch.Generator().manual_seed(0)
    table, weight = torch.randn(11, 16, generator=gen), torch.randn(16, generator=gen)
    theta = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    args = (torch.tensor([[0, 3, 7, 10, 3]]), table, weight, theta.cos(), theta.sin())
    traced = torch.compile(block, fullgraph=True, backend="eager", dynamic=False)
    for got, want in zip(traced(*args), block(*args), strict=True):
        assert torch.equal(got, want)
