"""The opaque ops `torch.ops.layerzero.*`: registration, opcheck, fake shapes, gradients, autocast, subclasses, vmap."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import layerzero as lz
from layerzero.ops.signature import PUBLIC
from layerzero.torch_ops import OPAQUE
from layerzero.torch_ops.library import OPS

ALL_OPS = tuple(op.name for op in OPS)


def rand(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


def leaf(tensor):
    """The same numbers and strides, with a gradient of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def swapped(*tensors):
    return tuple(leaf(t.transpose(1, 2)) for t in tensors)


def angles(seq, half):
    theta = torch.arange(float(seq))[:, None] * torch.logspace(0, -2, half)
    return theta.cos(), theta.sin()


def qkv(grad=True, heads=4, kv_heads=2, seq_q=5, seq_k=5, dim=8):
    return (
        rand(2, heads, seq_q, dim, grad=grad),
        rand(2, kv_heads, seq_k, dim, grad=grad),
        rand(2, kv_heads, seq_k, dim, grad=grad),
    )


def pages(grad=True):
    tables, lens = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)
    query_lens = torch.tensor([2, 1], dtype=torch.int32)
    cache = (rand(4, 4, 2, 8, grad=grad), rand(4, 4, 2, 8, grad=grad))
    return rand(3, 4, 8, grad=grad), *cache, tables, lens, query_lens, [7, 4], [2, 1]


def samples(grad=True):
    """(op, args) for every op; every tensor that may have a gradient asks for one."""
    q, k, v = qkv(grad)
    x, residual, weight, bias = rand(3, 4, 8, grad=grad), rand(3, 4, 8, grad=grad), rand(8, grad=grad), rand(8, grad=grad)
    cos, sin = angles(5, 4)
    logits = rand(3, 11, grad=grad)
    (transposed,) = swapped(rand(2, 5, 4, 8, grad=grad))
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 0, 1] = False
    codes = lz.quantize(rand(4, 32, grad=False), "int8", granularity="channel")
    packed = lz.quantize(rand(4, 32, grad=False), "nvfp4")
    return [
        ("attention", (q, k, v, None, "none", None, "BHSD", None, None, None, None)),
        ("attention", (q, k, v, mask, "none", 0.3, "BHSD", None, None, None, None)),
        ("attention", (transposed, k, v, None, "top_left", None, "BHSD", None, None, None, None)),
        ("attention", (*swapped(q, k, v), None, "bottom_right", None, "BSHD", [2, 0], 5.0,
                       torch.rand(4), None)),
        ("attention", (*(leaf(t[:, 0]) for t in (q, k, v)), None, "none", None, "BHSD", None, None, None, None)),
        ("attention_lse", (q, k, v, mask, "none", None, "BHSD", None, None, None, None)),
        ("attention_lse", (*swapped(q, k, v), None, "top_left", None, "BSHD", None, None, None,
                           None)),
        ("paged_attention", (*pages(grad), None, "NHD", None, None, None, None)),
        ("paged_attention_lse", (*pages(grad), 0.5, "NHD", [3, 0], None, None, None)),
        ("rms_norm", (x, weight, 1e-6, None)),
        ("rms_norm", (x, None, 1e-6, None)),
        ("rms_norm", (leaf(x.transpose(0, 1)), weight, 1e-6, None)),
        ("add_rms_norm", (x, residual, weight, 1e-6, None)),
        ("layer_norm", (x, weight, bias, 1e-5, None)),
        ("rope", (transposed, k, cos, sin, False, "BHSD", None, None)),
        ("rope_query", (q, cos[:, :2], sin[:, :2], True, "BHSD", torch.arange(5), None)),
        ("silu_and_mul", (x, None)),
        ("gelu_and_mul", (x, "tanh", None)),
        ("relu_and_mul", (x, None)),
        ("linear", (x, rand(6, 8, grad=grad), rand(6, grad=grad), "silu", None)),
        ("embedding", (torch.tensor([[1, 0, 3]]), rand(5, 8, grad=grad), None, None)),
        ("embedding_lookup", (torch.tensor([1, 0, 3]), rand(5, 8, grad=grad), 1, None)),
        ("sample_topk", (logits, 1, None, 1.0, None, None)),
        ("sample_topp", (logits, 0.5, None, 1.0, torch.zeros(3), None)),
        ("sample", (logits, None, torch.tensor([1, 1, 1]), 0.9, None, None, None, 1.0, None, None)),
        ("quantize", (rand(4, 32, grad=grad), "int8", "channel", None)),
        ("quantize", (rand(4, 32, grad=grad), "nvfp4", "block", None)),
        ("dequantize", (codes.data, codes.scale.clone().requires_grad_(grad), None, None, "int8", "channel", None,
                        [4, 32], torch.float32, None)),
        ("dequantize", (packed.data, packed.scale, None, packed.tensor_scale, "nvfp4", "block", 16, [4, 32],
                        torch.bfloat16, None)),
    ]  # fmt: skip


CASES = [pytest.param(name, i, id=f"{name}-{i}") for i, (name, _) in enumerate(samples(False))]


def op(name):
    return getattr(torch.ops.layerzero, name).default


@pytest.mark.parametrize(("name", "index"), CASES)
def test_opcheck(name, index):
    torch.library.opcheck(op(name), samples()[index][1])
