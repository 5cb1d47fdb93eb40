"""Level 1's ops beside torch's own functions: every kernel that takes the call here, result and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero._ops.paged import paged_batch
from layerzero_verify.oracles import rope_tables

BOUND = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Small numbers, so that results and gradients are near one and 1e-5 is 1e-5."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 4


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half as a product of complex numbers."""
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def swiglu(x: Tensor, packed: Tensor, down: Tensor) -> Tensor:
    gate, up = packed.chunk(2)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


COS, SIN = rope_tables(5, 8)
IDS, LABELS = torch.tensor([[2, 0, 6], [1, 2, 2]]), torch.tensor([1, -100, 3])
# name -> (op, a call of it, torch's own, what gradients are asked of)
CALLS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
    "rope": (
        "rope", lambda call, q, k: call(q, k, COS.float(), SIN.float()),
        lambda q, k: (rotated(q, COS, SIN), rotated(k, COS, SIN)), (drawn(2, 4, 5, 8), drawn(2, 2, 5, 8, seed=1)),
    ),
    "rms_norm": (
        "rms_norm", lambda call, *given: call(*given), lambda x, w: F.rms_norm(x, (16,), w, 1e-6),
        (drawn(3, 16), 1 + drawn(16, seed=1)),
    ),
    "mha": (
        "attention", lambda call, *qkv: call(*qkv, is_causal=True), attended,
        (drawn(2, 4, 6, 8), drawn(2, 4, 6, 8, seed=1), drawn(2, 4, 6, 8, seed=2)),
    ),
    "gqa": (
        "attention", lambda call, *qkv: call(*qkv, is_causal=True), attended,
        (drawn(2, 4, 6, 8), drawn(2, 2, 6, 8, seed=1), drawn(2, 2, 6, 8, seed=2)),
    ),
    "linear": (
        "linear", lambda call, x, w, b: call(x, w, b, "gelu"), lambda x, w, b: F.gelu(F.linear(x, w, b)),
        (drawn(3, 16), drawn(5, 16, seed=1), drawn(5, seed=2)),
    ),
    "mlp": (
        "mlp", lambda call, *given: call(*given), swiglu, (drawn(3, 8), drawn(24, 8, seed=1), drawn(8, 12, seed=2))
    ),
    "gelu_and_mul": (
        "gelu_and_mul", lambda call, x: call(x), lambda x: F.gelu(x[:, :8]) * x[:, 8:], (drawn(3, 16),)
    ),
    "silu_and_mul": (
        "silu_and_mul", lambda call, x: call(x), lambda x: F.silu(x[:, :8]) * x[:, 8:], (drawn(3, 16),)
    ),
    "cross_entropy": (
        "cross_entropy", lambda call, x: call(x, LABELS), lambda x: F.cross_entropy(x, LABELS), (drawn(3, 7),)
    ),
    "embedding": ("embedding", lambda call, w: call(IDS, w), lambda w: F.embedding(IDS, w), (drawn(7, 8),)),
}  # fmt: skip


def both(out: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, and the gradients of a sum that weighs each of their elements differently."""
    results = out if isinstance(out, tuple) else (out,)
    flat = torch.cat([item.flatten() for item in results])
    weights = torch.linspace(-1, 1, flat.numel() + 1, dtype=flat.dtype)[1:]
    return [*(item.detach() for item in results), *torch.autograd.grad((flat * weights).sum(), given)]


@pytest.mark.usefixtures("clean")
@pytest.mark.req("R-PAR-01", "R-PAR-02")
@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_here_gives_torchs_result_and_gradients(name: str) -> None:
    op, ask, theirs, given = CALLS[name]

    def leaves(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(item.to(dtype, copy=True).requires_grad_() for item in given)

    wide = leaves(torch.float64)
    want = both(theirs(*wide), wide)
    found = ask(partial(lz.explain, op), *leaves(torch.float32)).decision
    kernels = [item.kernel_id for item in found.candidates if item.accepted]
    assert f"reference.{op}.plain" in kernels
    for kernel in kernels:
        inputs = leaves(torch.float32)
        got = both(ask(partial(getattr(lz, op), backend=kernel), *inputs), inputs)
        for place, (left, right) in enumerate(zip(got, want, strict=True)):
            assert left.dtype is torch.float32
            assert (left.double() - right).abs().max().item() < BOUND, (kernel, place)


@pytest.mark.usefixtures("clean")
@pytest.mark.req("R-PAR-01", "R-PAR-02")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_and_decode_over_a_paged_cache_are_torchs_attention(layout: str) -> None:
    """A prompt of five tokens, then one more: each row of the result is that of causal attention over all six."""
    q, k, v = (drawn(6, heads, 8, seed=seed).float() for seed, heads in enumerate((4, 2, 2)))
    want = attended(*(item.double().transpose(0, 1)[None] for item in (q, k, v)))[0].transpose(0, 1)
    order = torch.tensor([2, 0, 1])  # pages of two tokens
    pages = [torch.empty(3, 2, 2, 8).index_copy_(0, order, item.view(3, 2, 2, 8)) for item in (k, v)]
    keys, values = (item if layout == "NHD" else item.transpose(1, 2).contiguous() for item in pages)
    tables = order[None].int()
    for start, stop in ((0, 5), (5, 6)):
        batch = paged_batch(tables, torch.tensor([stop]).int(), query_lens=torch.tensor([stop - start]).int())
        args = (q[start:stop], keys, values, batch)
        found = lz.explain("paged_attention", *args, layout=layout).decision
        kernels = [item.kernel_id for item in found.candidates if item.accepted]
        assert "reference.paged_attention.plain" in kernels
        for kernel in kernels:
            out = lz.paged_attention(*args, layout=layout, backend=kernel)
            assert (out.double() - want[start:stop]).abs().max().item() < BOUND, (kernel, start)
