"""Norms, activations, RoPE, sampling and quantization, drawn at random."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.backends.reference import positional, quantize, sampling
from layerzero.model.quant import QuantScheme
from layerzero.numerics import assert_close, tolerance
from layerzero_cpu import gated, norm, quantizing, rotary
from layerzero_cpu import sampling as mine
from layerzero_cpu.library import native

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ODD = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 261)


def drawn(dice: random.Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers in memory laid out in one of many ways: dense, with gaps, transposed, at an odd offset, expanded."""
    kind = dice.randrange(8)
    if kind == 1 and shape:
        return torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2]
    if kind == 2 and shape:
        return torch.randn(*shape[:-1], shape[-1] + 3).to(dtype)[..., 1:-2]
    if kind == 3 and len(shape) > 1:
        return torch.randn(*reversed(shape)).to(dtype).permute(*reversed(range(len(shape))))
    if kind == 4 and len(shape) > 1:
        return torch.randn(1, *shape[1:]).to(dtype).expand(*shape)
    if kind == 5 and len(shape) > 2:
        return torch.randn(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1)
    if kind == 6:
        count = 1
        for size in shape:
            count *= size
        return torch.randn(count + 1).to(dtype)[1:].view(shape)
    return torch.randn(shape).to(dtype)


def lead(dice: random.Random) -> list[int]:
    return [dice.choice((0, 1, 2, 3, 5)) for _ in range(dice.randrange(3))]


def close(op: str, got: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype and got.shape == right.shape
    assert_close(got, right, tolerance(op, dtype))


def rms(x: Tensor, w: Tensor | None, offset: float) -> Tensor:
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return out if w is None else out * (w + offset)


def norms(dice: random.Random) -> int:
    dtype, width, shape = dice.choice(FLOATS), dice.choice(ODD), lead(dice)
    x = drawn(dice, *shape, width, dtype=dtype)
    other = dice.choice((dtype, dtype, *FLOATS))
    w = None if dice.random() < 0.2 else drawn(dice, width, dtype=other)
    wide = None if w is None else w.double()
    close("rms_norm", norm.rms_norm(x, w, 1e-5), rms(x.double(), wide, 0.0), dtype)
    r = drawn(dice, *shape, width, dtype=dtype)
    out, stream = norm.add_rms_norm(x, r, w, 1e-5)
    right = (x.float() + r.float()).to(dtype)
    assert torch.equal(stream, right)
    close("add_rms_norm", out, rms(right.double(), wide, 0.0), dtype)
    b = None if dice.random() < 0.3 else drawn(dice, width, dtype=other)
    if width < 3:
        return 2
    right = F.layer_norm(x.double(), (width,), wide, None if b is None else b.double(), 1e-5)
    close("layer_norm", norm.layer_norm(x, w, b, 1e-5), right, dtype)
    return 3


def gradients(dice: random.Random) -> int:
    width, shape = dice.choice(ODD[2:]), lead(dice)
    x, g = drawn(dice, *shape, width, dtype=torch.float32), drawn(dice, *shape, width, dtype=torch.float32)
    w = drawn(dice, width, dtype=torch.float32)
    pairs = (
        (lambda a, b: norm.rms_norm(a, b, 1e-2), lambda a, b: rms_eps(a, b, 1e-2)),
        (
            lambda a, b: norm.layer_norm(a, b, None, 1e-2),
            lambda a, b: F.layer_norm(a, (width,), b, None, 1e-2),
        ),
    )
    for ours, theirs in pairs:
        a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        c, d = x.double().detach().requires_grad_(), w.double().detach().requires_grad_()
        got = torch.autograd.grad(ours(a, b), (a, b), g)
        right = torch.autograd.grad(theirs(c, d), (c, d), g.double())
        for one, two in zip(got, right, strict=True):
            assert_close(one, two, tolerance("layer_norm", torch.float32))
    return 4


def rms_eps(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def activations(dice: random.Random) -> int:
    dtype, width = dice.choice(FLOATS), dice.choice(ODD)
    x = drawn(dice, *lead(dice), 2 * width, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close("silu_and_mul", gated.silu_and_mul(x), F.silu(gate) * up, dtype)
    how = dice.choice(("none", "tanh"))
    close("gelu_and_mul", gated.gelu_and_mul(x, how), F.gelu(gate, approximate=how) * up, dtype)
    given = x.float().detach().requires_grad_()
    grad = torch.randn(up.shape)
    (got,) = torch.autograd.grad(gated.silu_and_mul(given), given, grad)
    leaf = x.double().detach().requires_grad_()
    one, two = leaf.chunk(2, -1)
    (right,) = torch.autograd.grad(F.silu(one) * two, leaf, grad.double())
    assert_close(got, right, tolerance("layer_norm", torch.float32))
    return 4


def rope(dice: random.Random) -> int:
    dtype, dim = dice.choice(FLOATS), dice.choice((2, 4, 6, 8, 10, 16, 18, 32, 36, 64, 66, 128))
    part = 2 * dice.randrange(1, dim // 2 + 1)
    batch, seq, heads, fewer = dice.randrange(0, 4), dice.choice((0, 1, 2, 7, 8, 9, 17)), dice.randrange(1, 5), 2
    layout, interleaved = dice.choice(("BHSD", "BSHD")), dice.random() < 0.5
    rows = seq + dice.randrange(1, 4)

    def heads_of(count: int) -> Tensor:
        shape = (batch, count, seq, dim) if layout == "BHSD" else (batch, seq, count, dim)
        return drawn(dice, *shape, dtype=dtype)

    q, k = heads_of(heads), heads_of(fewer) if dice.random() < 0.7 else None
    kind = dice.choice(FLOATS)
    if dice.random() < 0.4:
        shape: tuple[int, ...] = (dice.choice((1, max(1, batch))), rows, part)
    else:
        shape = (rows, part // 2)
    cos, sin = drawn(dice, *shape, dtype=kind), drawn(dice, *shape, dtype=kind)
    ids = torch.randint(0, rows, (batch, seq)) if dice.random() < 0.5 and batch else None
    if ids is not None and dice.random() < 0.5:
        ids = ids.int()
    got = rotary.rope(q, k, cos, sin, interleaved, layout, ids, False)
    right = positional.rope(
        q.double(), None if k is None else k.double(), cos.double(), sin.double(), interleaved, layout, ids, False
    )
    for a, b in zip(got, right, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            close("rope", a, b, dtype)
    return 1


def samples(dice: random.Random) -> int:
    batch, vocab = dice.randrange(0, 5), dice.choice((1, 2, 3, 63, 64, 65, 200, 1000))
    logits = drawn(dice, batch, vocab, dtype=dice.choice(FLOATS)) * dice.choice((0.1, 1.0, 8.0))
    if dice.random() < 0.3:
        logits = logits.round()
    if dice.random() < 0.1 and batch:
        logits = logits.contiguous()
        logits[0, dice.randrange(vocab)] = dice.choice((torch.nan, torch.inf, -torch.inf))

    def param(*values: Any, dtype: torch.dtype = torch.float32) -> Any:
        if dice.random() < 0.3:
            return torch.tensor([dice.choice([v for v in values if v is not None]) for _ in range(batch)], dtype=dtype)
        return dice.choice(values)

    k = param(None, 1, 2, 7, 50, dtype=torch.int64)
    rest = param(None, 0.0, 0.3, 0.9, 1.0), param(None, 0.0, 0.1, 1.0), param(1.0, 0.5, 2.0)
    seed = torch.Generator()
    got = mine.sample(logits, k, *rest, seed.manual_seed(1))
    right = sampling.sample(logits, k, *rest, seed.manual_seed(1))
    assert torch.equal(got, right), (logits, k, rest, got, right)
    return 1


def codes(dice: random.Random) -> int:
    fmt = dice.choice(("int8", "int4", "fp8_e4m3", "fp8_e5m2"))
    granularity, symmetric = dice.choice(("tensor", "channel", "block")), fmt[0] == "f" or dice.random() < 0.5
    block = dice.choice((2, 4, 16, 32)) if granularity == "block" else None
    width = dice.choice((2, 6, 32, 64, 96, 130)) if block is None else block * dice.randrange(1, 5)
    x = drawn(dice, *lead(dice), width, dtype=dice.choice(FLOATS)) * dice.choice((1e-3, 1.0, 100.0))
    scheme = QuantScheme(fmt, granularity, block, symmetric)  # type: ignore[arg-type]
    a, b = quantizing.quantize(x, scheme), quantize.quantize(x, scheme)
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)
    target = dice.choice((None, *FLOATS))
    assert torch.equal(quantizing.dequantize(a, target), quantize.dequantize(b, target))
    return 2


def nonsense(dice: random.Random) -> int:
    """Arguments of the right kinds that do not fit together: refused or done, never a crash."""
    name = dice.choice([n for n in native.kernels if n in SIGNATURES])

    def thing(letter: str) -> Any:
        if letter == "i":
            return dice.choice((-3, -1, 0, 1, 2, 3, 7, 2**40))
        if letter == "f":
            return dice.choice((-1.0, 0.0, 0.5, 1e-6, 3.0))
        if letter == "O" and dice.random() < 0.4:
            return None
        dtype = dice.choice((*FLOATS, *FLOATS, torch.int64, torch.int32, torch.uint8, torch.float64, torch.int8))
        shape = [dice.choice((0, 1, 2, 3, 4, 8, 9)) for _ in range(dice.randrange(5))]
        values = drawn(dice, *shape, dtype=torch.float32)
        return values.to(dtype) if dtype.is_floating_point else (values * 3).to(dtype)

    try:
        getattr(native, name)(*(thing(letter) for letter in SIGNATURES[name]))
    except (ValueError, TypeError):
        pass
    return 1


SIGNATURES = {
    "rms_norm": "TOffT", "add_rms_norm": "TTOffTT", "layer_norm": "TOOfT", "rms_norm_grad": "TOTOffTO",
    "layer_norm_grad": "TTOfTTT", "gated": "TTi", "gated_grad": "TTTi", "rope": "TOTTOTOiii", "sample": "TTOOiOfOfOf",
    "quantize": "TTTOii", "dequantize": "TTOTii", "copied": "TT", "read": "T",
}  # fmt: skip

CASES = {
    "norms": norms, "gradients": gradients, "activations": activations, "rope": rope, "samples": samples,
    "codes": codes, "nonsense": nonsense,
}  # fmt: skip
