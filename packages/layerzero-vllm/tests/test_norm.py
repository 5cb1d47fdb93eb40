"""Norms of a CPU: a provider of vLLM's IR ops, taken where no compiler fuses them and it is the quicker one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from layerzero_vllm import norm
from layerzero_vllm.choice import OURS, THEIRS
from layerzero_vllm.norm import Model

EAGER = Model(64, torch.bfloat16, compiled=False)


def native(x, weight, epsilon, variance_size=None):
    """As vLLM writes it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def native_add(x, x_residual, weight, epsilon, variance_size=None):
    total = x.float() + x_residual.float()
    return native(total, weight.float(), epsilon).to(x.dtype), total.to(x.dtype)


class Op:
    """Stands for an IR op of vLLM's."""

    def __init__(self, function, activations, slow=0.0, off=0.0):
        def late(*given):
            time.sleep(slow)
            found = function(*given)
            return found + off if isinstance(found, torch.Tensor) else (found[0], found[1] + off)

        self.impls, self.activations = {"native": SimpleNamespace(impl_fn=late)}, activations
        self.supports = {}

    def register_impl(self, provider, supports_args):
        def registered(function):
            self.impls[provider], self.supports[provider] = SimpleNamespace(impl_fn=function), supports_args

        return registered

    def get_tolerance(self, dtype):
        return {torch.float32: {"atol": 1e-5, "rtol": 1e-5}}.get(dtype, {"atol": 1e-2, "rtol": 1.6e-2})


def ops(**told):
    found = SimpleNamespace(rms_norm=Op(native, ["x"], **told), fused_add_rms_norm=Op(native_add, ["x", "r"], **told))
    norm.register(found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", norm.OPS)
def test_ours_computes_what_vllms_does_and_serves_where_it_is_quicker(name, dtype):
    op = getattr(ops(slow=0.002), name)
    told = norm.choose(op, name, Model(64, dtype, compiled=False), None)
    assert [one["phase"] for one in told] == ["1 tokens", "8 tokens", "64 tokens", "256 tokens"]
    assert {one["winner"] for one in told} == {OURS}
    assert all(set(one["times"]) == {OURS, THEIRS} and one["kernel"].count(".") for one in told)


@pytest.mark.parametrize("name", norm.OPS)
def test_a_result_that_differs_leaves_the_op_to_vllm(name):
    (told,) = norm.choose(getattr(ops(slow=0.002, off=0.5), name), name, EAGER, None)
    assert (told["winner"], told["reason"]) == (THEIRS, "the two disagree on a drawn input")


def test_a_slower_one_is_not_taken(monkeypatch):
    monkeypatch.setattr(norm, "race", lambda ways, seconds: {OURS: 2.0, THEIRS: 1.0})
    told = norm.choose(ops().rms_norm, "rms_norm", EAGER, None)
    assert {one["winner"] for one in told} == {THEIRS} and {one["kernel"] for one in told} == {"vLLM's own"}
    assert {one["winner"] for one in norm.choose(ops().rms_norm, "rms_norm", EAGER, OURS)} == {OURS}


def test_compiled_graphs_are_inductors_and_a_pinned_side_is_taken():
    compiled = EAGER._replace(compiled=True)
    for side in (None, OURS):
        (told,) = norm.choose(ops(slow=0.002).rms_norm, "rms_norm", compiled, side)
        assert (told["winner"], told["times"]) == (THEIRS, {}) and "Inductor" in told["reason"]
    (told,) = norm.choose(ops(slow=0.002).rms_norm, "rms_norm", EAGER, THEIRS)
    assert (told["winner"], told["reason"]) == (THEIRS, "vllm is pinned")


def test_the_provider_serves_rows_of_one_dtype_that_are_as_wide_as_their_mean():
    found = ops()
    x, weight = torch.ones(2, 8), torch.ones(8)
    serves, serves_add = (getattr(found, name).supports["layerzero"] for name in norm.OPS)
    assert serves(x, weight, 1e-6) and serves(x, None, 1e-6) and serves_add(x, x, weight, 1e-6)
    assert (
        not serves(x, weight, 1e-6, 4)
        and not serves(x.bfloat16(), weight, 1e-6)
        and not serves(x.to("meta"), weight, 1e-6)
    )
    assert not serves(x.double(), weight.double(), 1e-6)
    assert not serves_add(x, x.bfloat16(), weight, 1e-6) and not serves_add(x, x, weight.bfloat16(), 1e-6)
