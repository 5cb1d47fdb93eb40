"""`lz.mlp` against a NumPy and SciPy formula in float64: every form, activation, dtype and kernel; gradients; edges."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf, expit

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

# torch says so once, on a CPU without bfloat16 instructions
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

KERNELS = ("reference.mlp.plain", "torch.mlp.native")
KINDS = ("gated", "split", "plain")
EXAMPLES = 1_000 if os.environ.get("LAYERZERO_PROVE") == "1" else 25
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTS = {
    "silu": lambda v: v * expit(v),
    "gelu": lambda v: 0.5 * v * (1 + erf(v / np.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0),
}


def draw(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def block(kind, dtype, *, rows=(2, 3), hidden=48, inner=64, out=40, bias=False, seed=0):
    """x, weights and biases by name, as the public function takes them."""
    wide = 2 * inner if kind == "gated" else inner
    made = {
        "x": draw(*rows, hidden, dtype=dtype, seed=seed),
        "up_weight": draw(wide, hidden, dtype=dtype, seed=seed + 1, scale=0.1),
        "down_weight": draw(out, inner, dtype=dtype, seed=seed + 2, scale=0.1),
    }
    if kind == "split":
        made["gate_weight"] = draw(inner, hidden, dtype=dtype, seed=seed + 3, scale=0.1)
    if bias:
        made["up_bias"] = draw(wide, dtype=dtype, seed=seed + 4, scale=0.1)
        made["down_bias"] = draw(out, dtype=dtype, seed=seed + 5, scale=0.1)
        if kind == "split":
            made["gate_bias"] = draw(inner, dtype=dtype, seed=seed + 6, scale=0.1)
    return made


def oracle(given, activation):
    """The definition, in NumPy."""
    at = {name: value.detach().double().numpy() for name, value in given.items()}
    up = at["x"] @ at["up_weight"].T + at.get("up_bias", 0.0)
    inner = at["down_weight"].shape[1]
    if "gate_weight" in at:
        mid = ACTS[activation](at["x"] @ at["gate_weight"].T + at.get("gate_bias", 0.0)) * up
    elif up.shape[-1] == 2 * inner:
        mid = ACTS[activation](up[..., :inner]) * up[..., inner:]
    else:
        mid = ACTS[activation](up)
    return torch.from_numpy(mid @ at["down_weight"].T + at.get("down_bias", 0.0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.req("R-MLP-01", "R-TOL-03")
def test_every_form_equals_the_formula(kernel, dtype, kind, bias):
    for activation in ACTS:
        given_ = block(kind, dtype, bias=bias)
        out = lz.mlp(**given_, activation=activation, backend=kernel)
        assert out.dtype == dtype and out.shape == (2, 3, 40)
        assert_close(out, oracle(given_, activation), tolerance("mlp", dtype, k=64))


@pytest.mark.req("R-MLP-01")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [(1,), (2, 40)])
def test_whatever_kernel_takes_a_form_here_equals_the_formula(rows, device):
    """As they are ranked for one row and for many: those that keep the product between the two weights, too."""
    with lz.scoped(on_first_use="off"):
        for kind, activation in product(KINDS, ACTS):
            given_ = block(kind, torch.bfloat16, rows=rows, hidden=32, inner=64, out=32)
            want = oracle(given_, activation)
            here = {name: value.to(device) for name, value in given_.items()}
            kernels = lz.select("mlp", **here, activation=activation).ranking
            assert kernels[0] == lz.which("mlp", **here, activation=activation) and len(kernels) > 1
            for kernel in kernels:
                out = lz.mlp(**here, activation=activation, backend=kernel)
                path = f"{kernel} {kind} {activation}"
                assert_close(out.cpu(), want, tolerance("mlp", torch.bfloat16, k=64), path=path)


@pytest.mark.req("R-MLP-01")
def test_the_forms_are_the_models_blocks():
    """SwiGLU as Llama, GeGLU as Gemma, fc1-gelu-fc2 as GPT-2 and ViT have them, from torch.nn."""
    x, hidden, inner = draw(4, 24, dtype=torch.float32), 24, 32
    gate, up, down = torch.nn.Linear(hidden, inner, False), torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, 24)
    bound = tolerance("mlp", torch.float32, k=32)
    with torch.no_grad():
        want = torch.nn.functional.linear(torch.nn.functional.silu(gate(x)) * up(x), down.weight, down.bias)
        got = lz.mlp(x, up.weight, down.weight, gate.weight, up_bias=up.bias, down_bias=down.bias)
        packed = torch.cat((gate.weight, up.weight))
        both = torch.cat((torch.zeros(inner), up.bias))
        same = lz.mlp(x, packed, down.weight, up_bias=both, down_bias=down.bias)
        plain = torch.nn.Sequential(up, torch.nn.GELU(approximate="tanh"), down)
        fc = lz.mlp(x, up.weight, down.weight, None, "gelu_tanh", up_bias=up.bias, down_bias=down.bias)
    assert_close(got, want, bound)
    assert_close(same, want, bound)
    assert_close(fc, plain(x), bound)


# -- gradients -----------------------------------------------------------------------------------------
def torch_formula(t, activation):
    """The definition again, for torch to differentiate."""
    acts = {
        "silu": lambda v: v / (1 + torch.exp(-v)),
        "gelu": lambda v: 0.5 * v * (1 + torch.erf(v / 2**0.5)),
        "gelu_tanh": lambda v: 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
        "relu": lambda v: v.clamp(min=0),
    }
    up = t["x"] @ t["up_weight"].mT + t.get("up_bias", 0)
    inner = t["down_weight"].shape[1]
    if "gate_weight" in t:
        mid = acts[activation](t["x"] @ t["gate_weight"].mT + t.get("gate_bias", 0)) * up
    elif up.shape[-1] == 2 * inner:
        mid = acts[activation](up[..., :inner]) * up[..., inner:]
    else:
        mid = acts[activation](up)
    return mid @ t["down_weight"].mT + t.get("down_bias", 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.req("R-MLP-01")
def test_gradients_are_those_of_the_formula_in_float64(kernel, dtype, kind):
    for activation in ACTS:
        narrow = {name: value.requires_grad_() for name, value in block(kind, dtype, bias=True).items()}
        wide = {name: value.detach().double().requires_grad_() for name, value in narrow.items()}
        # a steady slope: what comes back is of the size of what went in
        slope = draw(2, 3, 40, seed=9, scale=0.1)
        got = torch.autograd.grad(
            lz.mlp(**narrow, activation=activation, backend=kernel), narrow.values(), slope.to(dtype)
        )
        want = torch.autograd.grad(torch_formula(wide, activation), wide.values(), slope.to(dtype).double())
        assert_close(list(got), list(want), tolerance("gradient", dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel):
    given_ = block("gated", torch.float64, rows=(2,), hidden=3, inner=4, out=2, bias=True)
    names = list(given_)
    leaves = [value.requires_grad_() for value in given_.values()]
    assert torch.autograd.gradcheck(
        lambda *t: lz.mlp(**dict(zip(names, t, strict=True)), activation="gelu", backend=kernel), leaves
    )


# -- any shape, stride and value --------------------------------------------------------------------------
def strided(tensor, how):
    """The same numbers, lying otherwise."""
    if how == "step":
        room = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=tensor.dtype)
        room[..., ::2] = tensor
        return room[..., ::2]
    if how == "transposed" and tensor.ndim == 2:
        return tensor.T.contiguous().T
    return tensor


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    kernel=st.sampled_from(KERNELS),
    activation=st.sampled_from(sorted(ACTS)),
    sizes=st.tuples(*(st.integers(1, n) for n in (6, 20, 24, 9))),
    how=st.sampled_from(("plain", "step", "transposed")),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_shape_and_stride(kind, dtype, kernel, activation, sizes, how, bias, seed):
    rows, hidden, inner, out = sizes
    given_ = block(kind, dtype, rows=(rows,), hidden=hidden, inner=inner, out=out, bias=bias, seed=seed)
    lying = {name: strided(value, how) for name, value in given_.items()}
    got = lz.mlp(**lying, activation=activation, backend=kernel)
    assert_close(got, oracle(given_, activation), tolerance("mlp", dtype, k=max(hidden, inner)))
    assert torch.equal(got, lz.mlp(**lying, activation=activation, backend=kernel))  # and again, bit by bit


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ACTS)
def test_edge_values_stay_in_their_row(kernel, activation):
    given_ = block("gated", torch.float32, rows=(6,), hidden=8, inner=8, out=8)
    x = given_["x"]
    x[0], x[1], x[2, 3], x[3, 0], x[4] = 0.0, 1e-42, float("nan"), float("inf"), -1e4
    out = lz.mlp(**given_, activation=activation, backend=kernel)
    assert torch.equal(out[0], torch.zeros(8))
    assert out[1].abs().max() < 1e-30
    assert out[2].isnan().all()
    assert not out[3].isfinite().any()
    finite = {**given_, "x": x[[1, 4, 5]]}
    # the bound is for numbers around one, so the rows are brought there by the size of what is summed in them
    size = oracle({name: value.abs() for name, value in finite.items()}, "relu").amax(dim=-1, keepdim=True).clamp_min(1)
    want = oracle(finite, activation) / size
    assert_close(out[[1, 4, 5]].double() / size, want, tolerance("mlp", torch.float32, k=8))


def test_an_empty_batch_gives_an_empty_result():
    given_ = block("gated", torch.float32, rows=(0,))
    assert lz.mlp(**given_).shape == (0, 40)


def test_autocast_decides_the_dtype():
    given_ = block("split", torch.float32, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lz.mlp(**given_)
    assert out.dtype == torch.bfloat16
    narrow = {name: value.to(torch.bfloat16) for name, value in given_.items()}
    assert_close(out, oracle(narrow, "silu"), tolerance("mlp", torch.bfloat16))


# -- bad calls ---------------------------------------------------------------------------------------------
def w(*shape):
    return torch.zeros(shape)


X = w(3, 8)
BAD = {
    "x narrower than up": (lambda: lz.mlp(w(3, 7), w(16, 8), w(8, 8)), "SHAPE_INVALID", "8"),
    "up of another height": (lambda: lz.mlp(X, w(12, 8), w(8, 8)), "SHAPE_INVALID", "16 for gate and up packed"),
    "gate of another height": (lambda: lz.mlp(X, w(8, 8), w(8, 8), w(9, 8)), "SHAPE_INVALID", "(8, 8)"),
    "packed up beside a gate": (lambda: lz.mlp(X, w(16, 8), w(8, 8), w(8, 8)), "SHAPE_INVALID", "(8, 8)"),
    "gate_bias without a gate": (lambda: lz.mlp(X, w(16, 8), w(8, 8), gate_bias=w(8)), "VALUE_INVALID", "gate_weight"),
    "bias of half the packed width": (lambda: lz.mlp(X, w(16, 8), w(8, 8), up_bias=w(8)), "SHAPE_INVALID", "(16,)"),
    "down bias": (lambda: lz.mlp(X, w(16, 8), w(8, 8), down_bias=w(3)), "SHAPE_INVALID", "(8,)"),
    "activation": (lambda: lz.mlp(X, w(16, 8), w(8, 8), None, "swish"), "VALUE_INVALID", "gelu_tanh"),
    "rank of up": (lambda: lz.mlp(X, w(8), w(8, 8)), "RANK_INVALID", "2"),
    "integers": (lambda: lz.mlp(X.int(), w(16, 8), w(8, 8)), "DTYPE_UNSUPPORTED", "float"),
    "list for a weight": (lambda: lz.mlp(X, [1.0], w(8, 8)), "TYPE_INVALID", "torch.Tensor"),
    "no inner width": (lambda: lz.mlp(X, w(0, 8), w(8, 0)), "SHAPE_INVALID", "rows"),
    "elsewhere": (lambda: lz.mlp(X, w(16, 8).to("meta"), w(8, 8)), "DEVICE_MIXED", "meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    call, code, says = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.code == code and says in str(caught.value) + str(caught.value.reasons[0])
