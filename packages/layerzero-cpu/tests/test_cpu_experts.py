"""Experts on the CPU against a loop over tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import assert_close, tolerance

GPT_OSS = {"activation": "swigluoai", "limit": 0.7, "interleaved": True, "bias": True}
OPTIONS = {
    "silu": {},
    "gpt_oss": GPT_OSS,
    "gpt_oss_transposed": {**GPT_OSS, "transposed": True},
    "clamped_bias": {"limit": 0.5, "bias": True},
    "interleaved_gelu": {"activation": "gelu", "interleaved": True, "transposed": True},
    "no_gate": {"activation": "gelu_tanh", "gated": False, "bias": True},
    "no_gate_transposed": {"activation": "relu", "gated": False, "transposed": True},
}
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
}


def layer(options, dtype, tokens, experts=5, top_k=3, hidden=72, inner=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    given = dict(options)
    bias, transposed, gated = given.pop("bias", False), given.pop("transposed", False), given.pop("gated", True)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    rows = 2 * inner if gated else inner
    gate_up, down = normal(experts, rows, hidden, scale=hidden**-0.5), normal(experts, hidden, inner, scale=inner**-0.5)
    if transposed:
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    if bias:
        given |= {"gate_up_bias": normal(experts, rows), "down_bias": normal(experts, hidden)}
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator)  # some of no expert here, some twice
    shares = torch.rand(tokens, top_k, generator=generator)
    return (normal(tokens, hidden), gate_up, down, shares, ids), {**given, "expert_offset": 1}


def truth(
    x, gate_up, down, shares, ids, *, activation="silu", limit=None, interleaved=False, expert_offset=0, **biases
):
    """Token by token, place by place, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = down.shape[2]
    for token, places in enumerate(ids.tolist()):
        for place, named in enumerate(places):
            expert = named - expert_offset
            if not 0 <= expert < down.shape[0]:
                continue
            both = gate_up[expert].double() @ x[token].double()
            if "gate_up_bias" in biases:
                both = both + biases["gate_up_bias"][expert].double()
            if both.shape[0] == inner:
                middle = ACTIVATIONS[activation](both)
            else:
                gate, up = (both[::2], both[1::2]) if interleaved else (both[:inner], both[inner:])
                bound = math.inf if limit is None else limit
                gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
                if activation == "swigluoai":
                    middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                else:
                    middle = ACTIVATIONS[activation](gate) * up
            result = down[expert].double() @ middle
            if "down_bias" in biases:
                result = result + biases["down_bias"][expert].double()
            out[token] += shares[token, place].double() * result
    return out


@pytest.mark.parametrize("tokens", [1, 6, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.req("R-MOE-01", "R-MOE-02")
def test_experts_are_right(name, dtype, tokens):
    args, options = layer(OPTIONS[name], dtype, tokens)
    want = truth(*args, **options).to(dtype)
    for kernel in ("cpu.moe.experts", "cpu.moe.fixed"):
        assert_close(lz.moe(*args, backend=kernel, **options), want, tolerance("moe", dtype, k=72))


@pytest.mark.parametrize("name", ["silu", "gpt_oss", "gpt_oss_transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_token_do_not_depend_on_its_company(name, dtype):
    args, options = layer(OPTIONS[name], dtype, 70)
    x, gate_up, down, shares, ids = args
    with lz.scoped(batch_invariant=True):  # else a first answer that is checked may have another kernel's bits
        together = lz.moe(*args, backend="cpu.moe.fixed", **options)
        for i in (0, 17, 69):
            one = slice(i, i + 1)
            alone = lz.moe(x[one], gate_up, down, shares[one], ids[one], backend="cpu.moe.fixed", **options)
            assert torch.equal(alone, together[one])


def test_the_result_is_the_same_on_any_number_of_threads():
    args, options = layer(GPT_OSS, torch.bfloat16, 40, hidden=256, inner=192)
    before = torch.get_num_threads()
    lz.moe(
        *args, backend="cpu", **options
    )  # where its kernel has no proof, the first answer is checked and may be another's
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(lz.moe(*args, backend="cpu", **options))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_nan_stays_with_its_token():
    (x, *rest), options = layer({}, torch.float32, 20)
    clean = lz.moe(x, *rest, backend="cpu.moe.fixed", **options)
    rest[3][4] = torch.tensor([1, 2, 3])  # a token that has experts
    clean = lz.moe(x, *rest, backend="cpu.moe.fixed", **options)
    x[4, 7] = math.nan
    out = lz.moe(x, *rest, backend="cpu.moe.fixed", **options)
    assert out[4].isnan().all()
    assert torch.equal(out[:4], clean[:4]) and torch.equal(out[5:], clean[5:])


def test_plain_experts_run_natively_where_no_gradient_is_wanted():
    args, options = layer(GPT_OSS, torch.bfloat16, 4)
    assert lz.which("moe", *args, **options) == "cpu.moe.experts"
    wanting = (args[0].requires_grad_(), *args[1:])
    assert not lz.which("moe", *wanting, **options).startswith("cpu.")


# -- codes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("granularity", "symmetric"), [("channel", True), ("block", True), ("block", False)])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.req("R-QUANT-01", "R-QUANT-03", "R-QUANT-04", "R-QUANT-09")
def test_quantized_experts_are_those_of_the_widened_weights(fmt, granularity, symmetric, dtype, tokens):
    (x, gate_up, down, *routed), options = layer(GPT_OSS, dtype, tokens, hidden=128, inner=64)
    block = {"block_size": 32} if granularity == "block" else {}
    codes = [lz.quantize(w, fmt, granularity=granularity, symmetric=symmetric, **block) for w in (gate_up, down)]
    want = truth(x, *(lz.dequantize(w, torch.float64) for w in codes), *routed, **options).to(dtype)
    assert lz.which("moe", x, *codes, *routed, **options) == "cpu.moe.codes"
    assert_close(lz.moe(x, *codes, *routed, **options), want, tolerance("moe", dtype, k=128))


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.req("R-QUANT-03")
def test_many_rows_of_experts_whose_sizes_fill_no_tile(fmt):
    (x, gate_up, down, *routed), options = layer({}, torch.float16, 300, hidden=200, inner=104)
    routed[1][:] = torch.tensor([0, 1, 2])  # 300 rows each, in several visits
    codes = [lz.quantize(w, fmt, granularity="channel") for w in (gate_up, down)]
    want = truth(x, *(lz.dequantize(w, torch.float64) for w in codes), *routed, **options).to(torch.float16)
    assert_close(lz.moe(x, *codes, *routed, backend="cpu", **options), want, tolerance("moe", torch.float16, k=200))


@pytest.mark.parametrize("spread", [1.0, 3e4, math.inf])
@pytest.mark.req("R-QUANT-09")
def test_rows_with_far_outliers_keep_their_small_numbers(spread):
    """Such a row is written in more digits, or computed in float: each by itself."""
    (x, gate_up, down, *routed), options = layer({}, torch.bfloat16, 8, hidden=256, inner=64)
    routed[1][:] = torch.tensor([1, 2, 3])
    x[3, 5] = spread
    codes = [lz.quantize(w, "int8", granularity="channel") for w in (gate_up, down)]
    want = truth(x, *(lz.dequantize(w, torch.float64) for w in codes), *routed, **options).to(torch.bfloat16)
    got = lz.moe(x, *codes, *routed, backend="cpu", **options)
    rows = [0, 1, 2, 4, 5, 6, 7] if spread == math.inf else list(range(8))
    assert_close(got[rows], want[rows], tolerance("moe", torch.bfloat16))


@pytest.mark.req("R-QUANT-07")
def test_packed_experts_are_used_as_they_are():
    (x, gate_up, down, *routed), options = layer({}, torch.bfloat16, 3, hidden=128, inner=64)
    codes = [lz.quantize(w, "int8", granularity="channel") for w in (gate_up, down)]
    packed = [lz.pack_weight(w) for w in codes]
    assert lz.which("moe", x, *packed, *routed, **options) == "cpu.moe.codes"
    assert torch.equal(lz.moe(x, *packed, *routed, **options), lz.moe(x, *codes, *routed, **options))


@pytest.mark.req("R-QUANT-05")
def test_weights_that_are_stored_differently_are_refused():
    (x, gate_up, down, *routed), _ = layer({}, torch.float32, 3, hidden=128, inner=64)
    codes = lz.quantize(down, "int8", granularity="channel")
    with pytest.raises(InvalidInputError, match=r"gate_up plain, down int8 by channel is not .* \[VALUE_INVALID\]"):
        lz.moe(x, gate_up, codes, *routed)


def test_quantized_experts_stand_in_a_graph():
    (x, gate_up, down, *routed), options = layer({}, torch.bfloat16, 4, hidden=128, inner=64)
    codes = [lz.quantize(w, "int4", granularity="block", block_size=32) for w in (gate_up, down)]

    @torch.compile(backend="eager", fullgraph=True)
    def run(x):
        return lz.moe(x, *codes, *routed, **options) * 2

    assert_close(run(x), lz.moe(x, *codes, *routed, **options) * 2, tolerance("moe", torch.bfloat16))
