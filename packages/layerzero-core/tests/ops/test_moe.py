"""`lz.moe` against a float64 formula that looks weights up slot by slot: kernels, dtypes, edges, gradients."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends.torch_native.moe import moe
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

# torch says so once, on a CPU without bfloat16 instructions
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
EXAMPLES = 1_000 if PROVE else 25
KERNELS = ("reference.moe.plain", "torch.moe.segments", "torch.moe.grouped_cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def served(*dtypes):
    """Every kernel with each dtype it takes; `F.grouped_mm` rounds between the products, so it takes float32 alone."""
    return [(k, d) for k in KERNELS for d in dtypes if d == torch.float32 or not k.endswith("grouped_cpu")]


ACTS = {
    "silu": lambda v: v / (1 + torch.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + torch.erf(v / 2**0.5)),
    "gelu_tanh": lambda v: 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
    "relu": lambda v: v.clamp(min=0),
}


def draw(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def layer(dtype, *, tokens=7, experts=6, top_k=3, hidden=24, inner=16, gated=True, seed=0, index=torch.int64):
    """x, gate_up, down, weights, ids: every token has `top_k` different experts."""
    rows = 2 * inner if gated else inner
    picked = draw(tokens, experts, seed=seed + 7).argsort(dim=-1)[:, :top_k]
    return (
        draw(tokens, hidden, dtype=dtype, seed=seed),
        draw(experts, rows, hidden, dtype=dtype, seed=seed + 1, scale=0.15),
        draw(experts, hidden, inner, dtype=dtype, seed=seed + 2, scale=0.15),
        draw(tokens, top_k, seed=seed + 3).softmax(dim=-1).float(),
        picked.to(index),
    )


def oracle(x, gate_up, down, weights, ids, activation="silu", offset=0, **oss):
    """Every slot gets copies of its own expert's weights; slots of other ranks get zeros. Differentiable."""
    x, gate_up, down, weights = (t.double() for t in (x, gate_up, down, weights))
    if oss:
        return _gpt_oss(x, gate_up, down, weights, ids, **oss)
    here = (ids >= offset) & (ids < offset + down.shape[0])
    mine = torch.where(here, ids - offset, 0).long()
    up = torch.einsum("th,tkih->tki", x, gate_up[mine])
    inner = down.shape[2]
    mid = ACTS[activation](up[..., :inner]) * up[..., inner:] if up.shape[-1] == 2 * inner else ACTS[activation](up)
    each = torch.einsum("tki,tkhi->tkh", mid, down[mine])
    return torch.einsum("tkh,tk->th", each, weights * here)


def _gpt_oss(x, gate_up, down, weights, ids, gate_up_bias, down_bias, alpha, limit):
    """The experts of gpt-oss, token by token, place by place."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[0])
        for place, expert in enumerate(ids[token].tolist()):
            both = gate_up[expert] @ x[token] + gate_up_bias[expert].double()
            gate, up = both[0::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
            result = down[expert] @ ((up + 1) * gate / (1 + torch.exp(-alpha * gate))) + down_bias[expert].double()
            total = total + weights[token, place] * result
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kernel", "dtype", "stored"),
    [
        (kernel, dtype, stored)
        for kernel, dtype in served(*DTYPES)
        for stored in ("as given", "transposed")
        if stored == "as given" or not kernel.endswith("grouped_cpu")  # which takes contiguous weights alone
    ],
)
@pytest.mark.req("R-MOE-02")
def test_experts_of_gpt_oss_equal_the_formula(kernel, dtype, stored):
    """Biases, the clamped and shifted gate, gate and up in turn; from weights as they lie and from transposed ones."""
    x, gate_up, down, weights, ids = layer(dtype)
    if stored == "transposed":
        gate_up, down = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (gate_up, down))
    oss = {
        "gate_up_bias": draw(6, 32, dtype=dtype, seed=4, scale=0.5),
        "down_bias": draw(6, 24, dtype=dtype, seed=5, scale=0.5),
        "alpha": 1.5,
        "limit": 0.7,
    }
    out = lz.moe(x, gate_up, down, weights, ids, activation="swigluoai", interleaved=True, backend=kernel, **oss)
    assert_close(out, oracle(x, gate_up, down, weights, ids, **oss), tolerance("moe", dtype, k=24))
    assert (out - lz.moe(x, gate_up, down, weights, ids, backend=kernel)).abs().max() > 0.1


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_biases_are_those_of_the_formula(kernel):
    x, gate_up, down, weights, ids = layer(torch.float32, tokens=4)
    biases = {"gate_up_bias": draw(6, 32, seed=4, scale=0.5).float(), "down_bias": draw(6, 24, seed=5).float()}
    options = {"alpha": 1.5, "limit": 0.7}
    slope = draw(4, 24, dtype=torch.float32, seed=9, scale=0.3)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights, *biases.values())]
    out = lz.moe(
        x, gate_up, down, weights, ids, activation="swigluoai", interleaved=True, backend=kernel, **biases, **options
    )
    got = torch.autograd.grad(out, leaves, slope)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(_gpt_oss(*wide[:4], ids, *wide[4:], **options), wide, slope.double())
    assert_close(list(got), list(want), tolerance("gradient", torch.float32))


def test_slots_of_experts_elsewhere_do_not_reach_the_gradients_of_biases():
    """`F.grouped_mm` writes nothing behind its last group: what is read there is filled with NaN here."""
    torch.manual_seed(0)
    sizes = ((5, 16), (6, 16, 16), (6, 16, 8), (5, 2), (6, 16), (6, 16))
    x, gate_up, down, shares, *biases = (torch.rand(size, requires_grad=True) for size in sizes)
    ids = torch.tensor([[0, 7], [9, 3], [5, 1], [11, 8], [2, 10]])
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        out = moe(x, gate_up, down, shares, ids, "silu", 0, *biases)
        found = torch.autograd.grad(out.square().sum(), (x, gate_up, down, shares, *biases))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(item.isfinite().all() for item in (out, *found))
    assert torch.equal(found[4][4], torch.zeros(16)), "nobody asked for this expert"


@pytest.mark.parametrize(
    ("gated", "given", "said"),
    [
        (False, {"interleaved": True}, "experts with a gate"),
        (False, {"activation": "swigluoai"}, "experts with a gate"),
        (True, {"limit": 0.0}, "above 0"),
        (True, {"alpha": "1"}, "a number"),
        (True, {"down_bias": torch.zeros(6, 3)}, "down_bias"),
    ],
)
def test_options_that_do_not_fit_are_refused(gated, given, said):
    with pytest.raises(InvalidInputError, match=said):
        lz.moe(*layer(torch.float32, gated=gated), **given)


@pytest.mark.parametrize(("kernel", "dtype"), served(*DTYPES))
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.req("R-MOE-02", "R-TOL-03")
def test_every_form_equals_the_formula(kernel, dtype, gated):
    for number, activation in enumerate(ACTS):
        args = layer(dtype, gated=gated, index=(torch.int64, torch.int32)[number % 2])
        out = lz.moe(*args, activation=activation, backend=kernel)
        assert out.dtype == dtype and out.shape == args[0].shape
        assert_close(out, oracle(*args, activation), tolerance("moe", dtype, k=24))


ROUTES = {
    "all to one": lambda ids: torch.full_like(ids, 4),
    "one expert a token": lambda ids: ids[:, :1],
    "two experts of six": lambda ids: ids % 2 * 3,
    "some of other ranks": lambda ids: torch.where(ids > 2, ids + 100, ids),
    "negative": lambda ids: torch.where(ids > 2, -1 - ids, ids),
    "none of here": lambda ids: ids - 6,
    "the largest number": lambda ids: torch.where(ids == 0, torch.iinfo(ids.dtype).max, ids),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.req("R-MOE-02")
def test_any_routing(kernel, name):
    for index in (torch.int64, torch.int32):
        x, gate_up, down, weights, ids = layer(torch.float32, index=index)
        ids = ROUTES[name](ids)
        args = (x, gate_up, down, weights[:, : ids.shape[1]], ids)
        assert_close(lz.moe(*args, backend=kernel), oracle(*args), tolerance("moe", torch.float32, k=24))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.req("R-MOE-02")
def test_no_token_and_one_token(kernel):
    args = layer(torch.float32, tokens=0)
    assert lz.moe(*args, backend=kernel).shape == (0, 24)  # the reference answers: nothing is to be computed
    one = layer(torch.float32, tokens=1, experts=1, top_k=1)
    assert_close(lz.moe(*one, backend=kernel), oracle(*one), tolerance("moe", torch.float32, k=24))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_nobody_asked_for_cannot_spoil_the_result(kernel):
    """NaN in an expert without tokens, and in the weight of a foreign slot: no NaN forward, none backward."""
    x, gate_up, down, weights, ids = layer(torch.float32)
    ids = torch.where(ids == 5, -1, ids)
    weights = torch.where(ids < 0, float("nan"), weights)
    gate_up[5], down[5], x[2] = float("nan"), float("inf"), float("nan")
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    out = lz.moe(*leaves, ids, backend=kernel)
    fine = [0, 1, 3, 4, 5, 6]
    assert out[fine].isfinite().all() and out[2].isnan().all()
    out[fine].sum().backward()
    assert x.grad[fine].isfinite().all() and weights.grad[fine].isfinite().all()
    others = sorted(set(range(5)) - set(ids[2].tolist()))  # an expert that met the token of NaN has them from it
    assert others and gate_up.grad[others].isfinite().all() and down.grad[others].isfinite().all()


# -- gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kernel", "dtype"), served(*DTYPES, torch.float64))
@pytest.mark.parametrize("route", ["plain", "some of other ranks", "all to one", "none of here"])
@pytest.mark.req("R-MOE-02")
def test_gradients_are_those_of_the_formula_in_float64(kernel, dtype, route):
    *floats, ids = layer(dtype, tokens=5)
    ids = ids if route == "plain" else ROUTES[route](ids)
    leaves = [t.requires_grad_() for t in floats]
    slope = draw(5, 24, dtype=dtype, seed=9, scale=0.3)
    got = torch.autograd.grad(lz.moe(*leaves, ids, backend=kernel), leaves, slope)
    wide = [t.detach().double().requires_grad_() for t in floats]
    want = torch.autograd.grad(oracle(*wide, ids), wide, slope.double())
    assert_close(list(got), list(want), tolerance("gradient", dtype))
    unused = sorted(set(range(6)) - set(ids.flatten().tolist()))
    assert not got[1][unused].any() and not got[2][unused].any()


@pytest.mark.parametrize("kernel", KERNELS[:2])
def test_gradcheck(kernel):
    x, gate_up, down, weights, ids = layer(torch.float64, tokens=3, experts=3, top_k=2, hidden=3, inner=2)
    leaves = tuple(t.double().requires_grad_() for t in (x, gate_up, down, weights))
    assert torch.autograd.gradcheck(lambda *t: lz.moe(*t, ids, activation="gelu", backend=kernel), leaves)


# -- ranks that share the experts ---------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.req("R-MOE-02")
def test_the_parts_of_all_ranks_add_up(kernel):
    x, gate_up, down, weights, ids = layer(torch.float32, experts=8, tokens=7)
    whole = lz.moe(x, gate_up, down, weights, ids, backend=kernel)
    parts = [
        lz.moe(x, gate_up[i : i + 2], down[i : i + 2], weights, ids, expert_offset=i, backend=kernel)
        for i in range(0, 8, 2)
    ]
    assert_close(sum(parts), whole.double(), tolerance("moe", torch.float32, k=24))
    # rank by rank, too: a wrong offset would still add up if every rank had it
    for number, part in enumerate(parts):
        want = oracle(x, gate_up[2 * number :][:2], down[2 * number :][:2], weights, ids, offset=2 * number)
        assert_close(part, want, tolerance("moe", torch.float32, k=24))


HIDDEN, INNER, EXPERTS, LOCAL = 7168, 2048, 256, 32


def deepseek(shrink, tokens, dtype):
    """A DeepSeek-V3 layer: 256 experts over 8 ranks, 8 a token; `shrink` divides both widths."""
    hidden, inner = HIDDEN // shrink, INNER // shrink
    logits = draw(tokens, EXPERTS, dtype=torch.float32, seed=1)
    bias = draw(EXPERTS, dtype=torch.float32, seed=2, scale=0.1)
    weights, ids = lz.topk_gate(logits, 8, scoring="sigmoid", bias=bias, num_groups=8, top_groups=4, scale=2.5)
    return draw(tokens, hidden, dtype=dtype, seed=3), hidden, inner, weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-MOE-03")
def test_deepseek_v3_shares_256_experts_among_eight_ranks(dtype):
    """The constants of the model, both widths divided by 64; each rank alone, and all eight together."""
    x, hidden, inner, weights, ids = deepseek(64, 8, dtype)
    gate_up = draw(EXPERTS, 2 * inner, hidden, dtype=dtype, seed=4, scale=0.06)
    down = draw(EXPERTS, hidden, inner, dtype=dtype, seed=5, scale=0.1)
    total = torch.zeros(8, hidden, dtype=torch.float64)
    for rank in range(EXPERTS // LOCAL):
        mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
        part = lz.moe(x, gate_up[mine], down[mine], weights, ids, expert_offset=rank * LOCAL)
        want = oracle(x, gate_up[mine], down[mine], weights, ids, offset=rank * LOCAL)
        assert_close(part, want, tolerance("moe", dtype, k=hidden))
        total += want
    assert_close(total, oracle(x, gate_up, down, weights, ids), tolerance("moe", torch.float64))
    assert_close(lz.moe(x, gate_up, down, weights, ids), total, tolerance("moe", dtype, k=hidden))


@pytest.mark.slow
@pytest.mark.skipif(not PROVE, reason="2.8 GB of weights; set LAYERZERO_PROVE=1")
@pytest.mark.req("R-MOE-03")
def test_one_rank_of_deepseek_v3_at_full_width():
    x, hidden, inner, weights, ids = deepseek(1, 2, torch.float32)
    assert (hidden, inner) == (HIDDEN, INNER)
    ids = ids % (2 * LOCAL)  # every token meets this rank
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.empty(LOCAL, 2 * inner, hidden, dtype=torch.bfloat16).normal_(0, 0.01, generator=generator)
    down = torch.empty(LOCAL, hidden, inner, dtype=torch.bfloat16).normal_(0, 0.01, generator=generator)
    x = x.to(torch.bfloat16)
    out = lz.moe(x, gate_up, down, weights, ids, expert_offset=LOCAL)
    want = torch.zeros(2, hidden, dtype=torch.float64)
    for token in range(2):
        for place in range(8):
            if LOCAL <= ids[token, place]:
                first, second = (w[ids[token, place] - LOCAL].double() for w in (gate_up, down))
                gate, up = (first @ x[token].double()).chunk(2)
                want[token] += weights[token, place].double() * (second @ (ACTS["silu"](gate) * up))
    assert_close(out, want, tolerance("moe", torch.bfloat16))


# -- any shape ------------------------------------------------------------------------------------------------
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    tokens=st.integers(0, 6),
    experts=st.integers(1, 5),
    hidden=st.integers(1, 17),
    inner=st.integers(1, 17),
    top_k=st.integers(1, 4),
    gated=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(("plain", "step", "transposed")),
    offset=st.integers(-2, 9),
    seed=st.integers(0, 9),
)
@pytest.mark.req("R-MOE-02")
def test_any_shape_stride_and_offset(tokens, experts, hidden, inner, top_k, gated, dtype, how, offset, seed):
    args = list(
        layer(dtype, tokens=tokens, experts=experts, top_k=1, hidden=hidden, inner=inner, gated=gated, seed=seed)
    )
    generator = torch.Generator().manual_seed(seed)
    args[3] = torch.rand(tokens, top_k, generator=generator)
    args[4] = torch.randint(-1, 12, (tokens, top_k), generator=generator)
    lying = list(args)
    for i in range(3):
        if how == "step":
            lying[i] = torch.stack((args[i], args[i]), dim=-1)[..., 0]
        elif how == "transposed":
            lying[i] = args[i].mT.contiguous().mT
    out = lz.moe(*lying, expert_offset=offset)
    assert_close(out, oracle(*args, offset=offset), tolerance("moe", dtype, k=max(hidden, inner)))
    assert torch.equal(out, lz.moe(*lying, expert_offset=offset))


# -- bad calls --------------------------------------------------------------------------------------------------
def call(**changes):
    x, gate_up, down, weights, ids = layer(torch.float32)
    given_ = {"x": x, "gate_up": gate_up, "down": down, "topk_weights": weights, "topk_ids": ids, **changes}
    return lambda: lz.moe(**given_)


BAD = {
    "x of another width": (call(x=torch.zeros(7, 23)), "SHAPE_INVALID"),
    "x of rank 3": (call(x=torch.zeros(1, 7, 24)), "RANK_INVALID"),
    "fewer downs": (call(down=torch.zeros(5, 24, 16)), "SHAPE_INVALID"),
    "inner widths": (call(down=torch.zeros(6, 24, 15)), "SHAPE_INVALID"),
    "no experts": (call(gate_up=torch.zeros(0, 32, 24), down=torch.zeros(0, 24, 16)), "SHAPE_INVALID"),
    "ids of other tokens": (call(topk_ids=torch.zeros(6, 3).long()), "SHAPE_INVALID"),
    "weights of another k": (call(topk_weights=torch.zeros(7, 2)), "SHAPE_INVALID"),
    "no expert per token": (
        call(topk_ids=torch.zeros(7, 0).long(), topk_weights=torch.zeros(7, 0)), "SHAPE_INVALID",
    ),
    "float ids": (call(topk_ids=torch.zeros(7, 3)), "DTYPE_UNSUPPORTED"),
    "integer weights": (call(topk_weights=torch.zeros(7, 3).long()), "DTYPE_UNSUPPORTED"),
    "activation": (call(activation="tanh"), "VALUE_INVALID"),
    "offset as float": (call(expert_offset=1.0), "TYPE_INVALID"),
    "offset as flag": (call(expert_offset=True), "TYPE_INVALID"),
    "ids as list": (call(topk_ids=[[0]]), "TYPE_INVALID"),
    "ids elsewhere": (call(topk_ids=torch.zeros(7, 3, dtype=torch.int64, device="meta")), "DEVICE_MIXED"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_means_nothing_is_refused(name):
    made, code = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        made()
    assert caught.value.code == code


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.req("R-TOL-03")
def test_nothing_is_rounded_between_the_products_on_a_cpu(dtype):
    """Many tokens of ordinary size: one rounding in between would take some results out of the bounds."""
    given = layer(dtype, tokens=256, hidden=128, inner=256, seed=5)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    for kernel in ("torch.moe.segments", "reference.moe.plain"):
        assert_close(lz.moe(*given, backend=kernel), oracle(*wide), tolerance("moe", dtype))
    x, first, second = given[0], given[1][0], given[2][0]
    want = lz.mlp(x.double(), first.double(), second.double(), backend="reference")
    assert_close(lz.mlp(x, first, second, backend="torch"), want, tolerance("mlp", dtype))
