"""The CPU kernels: every feature, odd sizes, strides and threads against the oracle in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_attention_calls import BY_NAME, NAMES, NEEDS, ORACLES, example

import layerzero as lz
from layerzero_linear_attention import chunks
from layerzero_linear_attention.build import LIBRARY

pytestmark = [
    pytest.mark.needs_tool("g++"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="missing tool: the compiled library"),
]

SIZES = {
    "one token": {"batch": 2, "seq_len": 1},
    "many": {"batch": 3, "seq_len": 70},
    "odd": {"batch": 2, "seq_len": 5, "key_dim": 7, "value_dim": 37, "head_dim": 3, "state_size": 19, "channels": 21},
}


def kernel(name):
    """The adapter of an op."""
    from layerzero_linear_attention import cpu

    return getattr(cpu, name)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_are_the_oracle(name, needs, sizes):
    known = {key: size for key, size in sizes.items() if key in BY_NAME[name].sizes}
    args = example(name, *needs, dtype="float32", **known)
    before = [item.clone() if isinstance(item, torch.Tensor) else item for item in args]
    for found, wanted in zip(kernel(name)(*args), ORACLES[name](*args), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
    for item, kept in zip(args, before, strict=True):
        assert item is kept or torch.equal(item, kept)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="missing tool: a torch with OpenMP")
def test_the_threads_are_those_of_torch():
    from layerzero_linear_attention import cpu

    assert cpu._TEAM


@pytest.mark.parametrize("name", NAMES)
def test_threads_change_nothing(name):
    args = example(name, "initial_state", dtype="float32", batch=8, seq_len=3)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(kernel(name)(*args))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_dtypes_are_rounded_once(name, dtype):
    args = example(name, "initial_state", dtype=dtype)
    wide = [item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in args]
    out, state = kernel(name)(*args)
    wanted, _ = BY_NAME[name].function(*wide)
    torch.testing.assert_close(out, wanted.to(out.dtype), rtol=1e-2, atol=2e-3)
    assert state.dtype == (out.dtype if name == "causal_conv1d" else torch.float32)


@pytest.mark.parametrize("steps", ["channels", "tokens", "neither"])
def test_the_convolution_takes_any_strides_and_every_way_leaves_the_same(steps):
    x, *rest = example("causal_conv1d", "silu", dtype="float32", channels=40, seq_len=67)
    laid = {
        "channels": x.transpose(1, 2).contiguous().transpose(1, 2),
        "tokens": x,
        "neither": torch.stack((x, x), -1)[..., 0],
    }[steps]
    op, wanted = BY_NAME["causal_conv1d"], ORACLES["causal_conv1d"](x, *rest)
    out, state = kernel("causal_conv1d")(laid, *rest)
    np.testing.assert_allclose(out.numpy(), wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.numpy(), wanted[1], rtol=1e-4, atol=1e-5)
    assert out.stride(1 if steps == "channels" else 2) == 1
    for way in (op.fake, op.function, chunks.causal_conv1d):
        assert way(laid, *rest)[0].stride() == out.stride(), way


@pytest.mark.parametrize(("width", "kept"), [(4, 4), (4, 3), (3, 2), (2, 1), (1, 1), (8, 8), (4, 2), (3, 9)])
@pytest.mark.parametrize("rows", [True, False])
def test_the_convolution_goes_on_from_a_state_of_any_length(width, kept, rows):
    for tokens in (1, 2, 9):
        sizes = {"width": width, "state_len": kept, "channels": 300, "seq_len": tokens}
        x, *rest = example("causal_conv1d", "initial_state", "bias", "silu", dtype="float32", **sizes)
        laid = x.transpose(1, 2).contiguous().transpose(1, 2) if rows else x
        for found, wanted in zip(kernel("causal_conv1d")(laid, *rest), ORACLES["causal_conv1d"](x, *rest), strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_values_that_are_no_numbers_stay_none_and_far_decays_are_zero():
    query, key, value, g, beta, *rest = example("gated_delta_rule", "initial_state", dtype="float32", seq_len=1)
    g = g.clone()
    g[0, 0, 0], g[0, 0, 1] = float("nan"), -1e4
    out, state = kernel("gated_delta_rule")(query, key, value, g, beta, *rest)
    assert out[0, 0, 0].isnan().all() and state[0, 0].isnan().all()
    written, _ = kernel("gated_delta_rule")(query, key, value, g * 0 - 1e4, beta, None, *rest[1:])
    torch.testing.assert_close(out[0, 0, 1], written[0, 0, 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_a_gradient_is_theirs_and_one_with_it_is_not(name):
    for grad in (False, True):
        args = example(name, "initial_state", dtype="float32", grad=grad)
        getattr(lz.ops, name)(*args)
        chosen = lz.which(name, *args)
        assert (chosen == f"linear_attention.{name}.native") is not grad, chosen


def test_the_backend_is_healthy_and_its_answers_are_known():
    from layerzero_linear_attention.health import self_test

    assert self_test().ok
