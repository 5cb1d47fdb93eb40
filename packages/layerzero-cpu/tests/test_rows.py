"""Norms, activations and RoPE against torch in float64: odd widths, strides, zero rows, special values, gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from layerzero.numerics import assert_close, tolerance
from layerzero_cpu import gated, norm, rotary

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# one vector and less, a vector and a bit, several, and none at all
WIDTHS = (1, 3, 4, 7, 8, 15, 16, 17, 33, 64, 100, 261, 1024)


def near(op, got, right, dtype):
    assert got.dtype is dtype
    assert_close(got, right.to(torch.float64), tolerance(op, dtype))


def rms(x, w, eps, offset=0.0):
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return out if w is None else out * (w + offset)


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_over_odd_widths(isa, dtype):
    for width in WIDTHS:
        x, r = torch.randn(2, 3, width).to(dtype), torch.randn(2, 3, width).to(dtype)
        w, b = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
        wide, weight, bias = x.double(), w.double(), b.double()
        near("rms_norm", norm.rms_norm(x, w, 1e-6), rms(wide, weight, 1e-6), dtype)
        near("rms_norm", norm.rms_norm(x, None, 1e-6), rms(wide, None, 1e-6), dtype)
        near("rms_norm", norm.gemma_rms_norm(x, w, 1e-6), rms(wide, weight, 1e-6, 1.0), dtype)
        if width > 1:
            right = F.layer_norm(wide, (width,), weight, bias, 1e-5)
            near("layer_norm", norm.layer_norm(x, w, b, 1e-5), right, dtype)
        stream = (wide + r.double()).to(torch.float32).to(dtype)
        out, kept = norm.add_rms_norm(x, r, w, 1e-6)
        assert torch.equal(kept, stream)
        near("add_rms_norm", out, rms(stream.double(), weight, 1e-6), dtype)
        assert torch.equal(out, norm.rms_norm(kept, w, 1e-6)), "the pair is the two ops apart, bit by bit"


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_over_odd_widths(isa, dtype):
    for width in WIDTHS:
        x = torch.randn(3, 2 * width).to(dtype) * 3
        gate, up = x.double().chunk(2, -1)
        near("silu_and_mul", gated.silu_and_mul(x), F.silu(gate) * up, dtype)
        near("relu_and_mul", gated.relu_and_mul(x), F.relu(gate) * up, dtype)
        for how in ("none", "tanh"):
            right = F.gelu(gate, approximate=how) * up
            near("gelu_and_mul", gated.gelu_and_mul(x, how), right, dtype)


def exact_gelu(gate):
    """By the C library: torch's vectors answer NaN for +inf on some processors."""
    return torch.tensor([0.5 * g * (1.0 + math.erf(g / math.sqrt(2.0))) for g in gate.tolist()])


ACTIVATIONS = {
    "silu": (gated.silu_and_mul, lambda g: g * torch.sigmoid(g), F.silu),
    "gelu": (
        lambda x: gated.gelu_and_mul(x, "none"),
        lambda g: g * torch.special.erfc(-g / math.sqrt(2.0)) / 2,
        F.gelu,
    ),
    "gelu_tanh": (
        lambda x: gated.gelu_and_mul(x, "tanh"),
        lambda g: g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)),
        lambda g: F.gelu(g, approximate="tanh"),
    ),
    "relu": (gated.relu_and_mul, F.relu, F.relu),
}


def every_gate(dtype):
    """Every finite number of 16 bits, each with 1 beside it: a whole row of them, and a row for each."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    gate = gate[gate.isfinite()]
    return gate, torch.cat((gate, torch.ones_like(gate)))[None], torch.stack((gate, torch.ones_like(gate)), -1)


@pytest.mark.fault(7)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_no_activation_of_a_bfloat16_is_less_exact_than_torchs(isa, kind):
    mine, formula, torchs = ACTIVATIONS[kind]
    gate, row, _ = every_gate(torch.bfloat16)
    truth = formula(gate.double())
    last_place = 2.0 ** (truth.abs().clamp_min(2.0**-126).log2().floor() - 7)
    error = ((mine(row)[0].double() - truth) / last_place).abs()
    peer = ((torchs(gate).double() - truth) / last_place).abs()
    normal = (truth.abs() >= 2.0**-120) | (truth == 0)  # what is smaller may be taken for nothing
    assert error[normal].max() <= 0.6
    assert bool((error <= peer.nan_to_num(nan=torch.inf).clamp_min(0.6))[normal].all())
    assert bool(((error <= peer) | (mine(row)[0].abs() <= 2.0**-119))[~normal].all())


@pytest.mark.fault(7)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_an_activation_does_not_depend_on_the_place_in_the_row(isa, kind, dtype):
    gate, row, alone = every_gate(dtype)
    mine = ACTIVATIONS[kind][0]
    right = mine(row)[0]
    assert torch.equal(mine(alone)[:, 0].view(torch.int16), right.view(torch.int16))
    width = 117  # seven vectors of the widest kind and a bit: every place of a body, and of what is left over
    for shift in (0, 1, 15):
        part = gate[shift : shift + len(gate) // width * width - width].view(-1, width)
        got = mine(torch.cat((part, torch.ones_like(part)), -1))
        assert torch.equal(got.view(torch.int16).flatten(), right[shift : shift + got.numel()].view(torch.int16))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_follow_torch_at_the_ends_of_the_range(isa, kind):
    """NaN, infinities, denormals and gates so large that an exponential overflows."""
    gate = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 88.0, -88.0, 89.0, -89.0, 1e4, -1e4, 1e38, -1e38])
    gate = torch.cat((gate, torch.tensor([torch.inf, -torch.inf, torch.nan])))
    x = torch.cat((gate, torch.ones_like(gate)))
    calls = {
        "silu": (gated.silu_and_mul, F.silu),
        "gelu": (lambda t: gated.gelu_and_mul(t, "none"), exact_gelu),
        "gelu_tanh": (lambda t: gated.gelu_and_mul(t, "tanh"), lambda t: F.gelu(t, approximate="tanh")),
        "relu": (gated.relu_and_mul, F.relu),
    }
    mine, torchs = calls[kind]
    got, right = mine(x[None])[0], torchs(gate)
    assert torch.equal(got.isnan(), right.isnan())
    assert torch.equal(got.isinf(), right.isinf())
    finite = right.isfinite()
    assert_close(got[finite], right[finite].double(), tolerance("silu_and_mul", torch.float32))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_stays_in_its_own_row(isa, bad):
    x = torch.randn(4, 37)
    x[2, 5] = bad
    for out in (norm.rms_norm(x, None, 1e-6), norm.layer_norm(x, None, None, 1e-5), gated.silu_and_mul(x[:, :36])):
        assert out[[0, 1, 3]].isfinite().all()
        assert not out[2].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_rows_and_gaps(isa, dtype):
    base = torch.randn(4, 6, 96).to(dtype)
    w = torch.randn(192).to(dtype)[::2]
    views = {
        "columns of a wider tensor": base[..., 8:72],
        "transposed rows": base.transpose(0, 1),
        "every other column": base[..., ::2],
        "one row for all": base[:1].expand(4, 6, 96),
    }
    for name, x in views.items():
        weight = w[: x.shape[-1]]
        near("rms_norm", norm.rms_norm(x, weight, 1e-6), rms(x.double(), weight.double(), 1e-6), dtype)
        right = F.layer_norm(x.double(), (x.shape[-1],), weight.double(), weight.double())
        near("layer_norm", norm.layer_norm(x, weight, weight, 1e-5), right, dtype)
        gate, up = x.double().chunk(2, -1)
        near("silu_and_mul", gated.silu_and_mul(x), F.silu(gate) * up, dtype)
        _, kept = norm.add_rms_norm(x, x, weight, 1e-6)
        assert torch.equal(kept, x + x), name


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_nothing_to_do_is_done(shape):
    x = torch.randn(shape)
    assert norm.rms_norm(x, None, 1e-6).shape == x.shape
    assert norm.layer_norm(x, None, None, 1e-5).shape == x.shape
    if shape[-1]:
        assert gated.silu_and_mul(x).shape == (*shape[:-1], shape[-1] // 2)


def turned(x, cos, sin, interleaved, seq_axis, ids):
    """RoPE by complex numbers, one token at a time: an oracle of its own."""
    out = x.double().clone()
    rotary_dim = 2 * cos.shape[-1]
    for b in range(x.shape[0]):
        for s in range(x.shape[seq_axis]):
            row = s if ids is None else int(ids[b, s])
            at = (b, slice(None), s) if seq_axis == 2 else (b, s)
            part = x.double()[at][..., :rotary_dim]
            a, c = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
            z = torch.complex(a, c) * torch.complex(cos[row].double(), sin[row].double())
            new = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
            out[at][..., :rotary_dim] = new
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_both_conventions(isa, dtype, layout, interleaved):
    axis = 2 if layout == "BHSD" else 1
    for dim, part, seq in ((8, 8, 1), (16, 6, 9), (36, 28, 7), (64, 64, 17)):
        shape = [2, 3, 3, dim]
        shape[axis] = seq
        other = list(shape)
        other[3 - axis] = 2
        q, k = torch.randn(shape).to(dtype), torch.randn(other).to(dtype)
        angles = torch.randn(20, part // 2)
        cos, sin = angles.cos(), angles.sin()
        ids = torch.randint(0, 20, (2, seq))
        for positions in (None, ids, ids.int()):
            got = rotary.rope(q, k, cos, sin, interleaved, layout, positions, False)
            for mine, x in zip(got, (q, k), strict=True):
                near("rope", mine, turned(x, cos, sin, interleaved, axis, positions), dtype)
        here = q.clone()
        out = rotary.rope(here, None, cos, sin, interleaved, layout, None, True)[0]
        assert out.data_ptr() == here.data_ptr()
        near("rope", here, turned(q, cos, sin, interleaved, axis, None), dtype)


def test_rope_of_gaps_and_of_tables_in_other_dtypes(isa):
    q = torch.randn(2, 5, 3, 32)[..., ::2]
    angles = torch.randn(6, 8).double()
    right = turned(q, angles.cos(), angles.sin(), False, 1, None)
    got = rotary.rope(q, None, angles.cos(), angles.sin(), False, "BSHD", None, False)[0]
    near("rope", got, right, torch.float32)
    low = angles.bfloat16()
    right = turned(q, low.cos(), low.sin(), False, 1, None)
    near("rope", rotary.rope(q, None, low.cos(), low.sin(), False, "BSHD", None, False)[0], right, torch.float32)
    backwards = angles.float().cos().t().contiguous().t(), angles.float().sin()  # two tables, two strides
    right = turned(q, *backwards, False, 1, None)
    here = q.clone()
    rotary.rope(here, None, *backwards, False, "BSHD", None, True)
    near("rope", here, right, torch.float32)


def gradients(function, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.sin(torch.arange(o.numel(), dtype=torch.float64)).reshape(o.shape) for o in outs]
    sum((o.double() * w).sum() for o, w in zip(outs, weights, strict=True)).backward()
    return [leaf.grad for leaf in leaves]


def same_gradients(op, mine, right, *tensors, dtype=torch.float32):
    got = gradients(mine, *tensors)
    wanted = gradients(right, *(t.double() for t in tensors))
    for a, b in zip(got, wanted, strict=True):
        assert a is not None and a.dtype is dtype
        assert_close(a, b, tolerance(op, dtype))


def test_gradients(isa):
    x, r, w, b = torch.randn(3, 5, 37), torch.randn(3, 5, 37), torch.rand(37) + 0.5, torch.randn(37)
    same_gradients("layer_norm", lambda x, w: norm.rms_norm(x, w, 1e-6), lambda x, w: rms(x, w, 1e-6), x, w)
    same_gradients("layer_norm", lambda x: norm.rms_norm(x, None, 1e-6), lambda x: rms(x, None, 1e-6), x)
    same_gradients(
        "layer_norm",
        lambda x, w: norm.gemma_rms_norm(x, w, 1e-6),
        lambda x, w: rms(x, w, 1e-6, 1.0),
        x,
        w,
    )
    same_gradients(
        "layer_norm",
        lambda x, r, w: norm.add_rms_norm(x, r, w, 1e-6),
        lambda x, r, w: (rms(x + r, w, 1e-6), x + r),
        x,
        r,
        w,
    )
    same_gradients(
        "layer_norm",
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (37,), w, b, 1e-5),
        x,
        w,
        b,
    )
    y = torch.randn(4, 70)
    for mine, right in (
        (gated.silu_and_mul, F.silu),
        (gated.relu_and_mul, F.relu),
        (lambda t: gated.gelu_and_mul(t, "none"), F.gelu),
        (lambda t: gated.gelu_and_mul(t, "tanh"), lambda t: F.gelu(t, approximate="tanh")),
    ):
        same_gradients("layer_norm", mine, lambda t, f=right: f(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1], y)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_rope_turn_back(isa, interleaved):
    """The rotation is orthogonal, so the gradient turned forward again is the gradient that came in."""
    q, k = torch.randn(2, 4, 5, 16, requires_grad=True), torch.randn(2, 2, 5, 16, requires_grad=True)
    angles = torch.randn(5, 6)
    cos, sin = angles.cos(), angles.sin()
    out = rotary.rope(q, k, cos, sin, interleaved, "BHSD", None, False)
    given = [torch.randn_like(o) for o in out]
    torch.autograd.backward(out, given)
    for leaf, came in zip((q, k), given, strict=True):
        again = rotary.rope(leaf.grad, None, cos, sin, interleaved, "BHSD", None, False)[0]
        assert_close(again, came.double(), tolerance("rope", torch.float32))


def test_a_result_nobody_uses_gives_no_gradient():
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 1, 3, 8, requires_grad=True)
    table = torch.randn(3, 4)
    rotary.rope(q, k, table, table, False, "BHSD", None, False)[0].sum().backward()
    assert q.grad is not None and k.grad is None


def test_gradients_of_the_tables_are_there_too():
    q = torch.randn(1, 2, 3, 8)
    cos, sin = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    rotary.rope(q, None, cos, sin, False, "BHSD", None, False)[0].sum().backward()
    assert cos.grad is not None and sin.grad is not None
    assert_close(cos.grad, (q[..., :4] + q[..., 4:]).sum((0, 1)).double(), tolerance("rope", torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_bits_is_rounded_as_torch_rounds(isa, dtype):
    """The stream x + residual: ties, denormals, infinities and NaNs of every kind."""
    bits = torch.randint(-(2**15), 2**15, (2, 64, 512)).to(torch.int16)
    x, r = bits.view(dtype)
    r[::2] = (x[::2].float() * 2.0 ** torch.randint(-12, -5, x[::2].shape)).to(dtype)  # ties are frequent here
    _, kept = norm.add_rms_norm(x, r, None, 1e-6)
    right = (x.float() + r.float()).to(dtype)
    assert torch.equal(kept.isnan(), right.isnan())
    numbers = ~right.isnan()
    assert torch.equal(kept.view(torch.int16)[numbers], right.view(torch.int16)[numbers])


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF])
def test_a_nan_of_any_payload_stays_one(isa, pattern):
    """A float32 weight or table may carry a NaN that rounding to bfloat16 could carry over into a zero."""
    strange = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert strange.isnan()
    x, w = torch.randn(2, 64).to(torch.bfloat16), torch.ones(64)
    w[37] = strange
    assert norm.rms_norm(x, w, 1e-6).isnan().sum() == 2
    assert norm.layer_norm(x, torch.ones(64), w, 1e-5).isnan().sum() == 2
    cos, sin = torch.ones(1, 64), torch.zeros(1, 64)
    cos[0, 5] = strange
    for interleaved in (False, True):
        q, _ = rotary.rope(x.view(1, 1, 1, 128), None, cos, sin, interleaved, "BHSD", None, False)
        assert q.isnan().sum() == 2
