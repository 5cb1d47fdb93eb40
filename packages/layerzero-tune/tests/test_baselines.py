"""Torch default computes what the op means: a baseline that computes something else would be no baseline."""

from __future__ import annotations

import pytest
import torch

from layerzero._ops.signature import public_op
from layerzero.numerics import assert_close, tolerance
from layerzero.tuning.inputs import build
from layerzero_cli.calls import context
from layerzero_tune.timing.baselines import torch_default

CALLS = [
    ("attention", {"q": (2, 9, 4, 16), "k": (2, 9, 2, 16), "layout": "BSHD", "causal": "top_left"}),
    ("attention", {"q": (2, 4, 1, 16), "k": (2, 2, 33, 16)}),
    ("attention", {"shape": (1, 2, 24, 16), "causal": "top_left", "window": (5, 0)}),
    ("paged_attention", {"q": (3, 4, 16), "k": (12, 4, 2, 16), "context": 14}),
    ("varlen_attention", {"q": (20, 4, 16), "k": (20, 2, 16), "context": 10, "causal": "top_left"}),
    ("rms_norm", {"shape": (5, 32)}),
    ("layer_norm", {"shape": (5, 32), "bias": True}),
    ("rope", {"q": (1, 7, 4, 16), "k": (1, 7, 2, 16), "layout": "BSHD"}),
    ("rope", {"q": (2, 4, 7, 16), "k": (2, 2, 7, 16)}),
    ("silu_and_mul", {"shape": (5, 32)}),
    ("gelu_and_mul", {"shape": (5, 32), "approximate": "tanh"}),
    ("linear", {"shape": (5, 32), "weight": (8, 32), "bias": True}),
    ("linear", {"shape": (5, 32), "weight": (8, 32), "format": "int8", "granularity": "channel"}),
]


@pytest.mark.parametrize(("op", "options"), CALLS, ids=lambda item: item if isinstance(item, str) else "")
def test_torch_default_gives_the_result_of_the_reference(op, options):
    call = build(context(op, {**options, "device": "cpu", "dtype": "fp32"}), device="cpu", seed=3)
    spec = public_op(op)
    named = dict(zip(spec.arguments, spec.lengthen(call.args), strict=True))
    given = {**named, "layout": call.layout or call.kwargs.get("layout")}
    found = torch_default(op, given)()
    wanted = public_op(op).function(**{**call.kwargs, "backend": "reference"})
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for left, right in pairs:
        if op == "paged_attention":
            left = left[:, :, 0]
        assert_close(left.contiguous(), right.contiguous(), tolerance(op, "float32", k=32))


def test_add_rms_norm_gives_the_norm_of_the_sum():
    call = build(context("add_rms_norm", {"shape": (5, 32), "device": "cpu", "dtype": "fp32"}), device="cpu", seed=3)
    spec = public_op("add_rms_norm")
    found = torch_default("add_rms_norm", dict(zip(spec.arguments, call.args, strict=True)))()
    wanted, _ = public_op("add_rms_norm").function(**{**call.kwargs, "backend": "reference"})
    assert_close(found, wanted, tolerance("add_rms_norm", "float32"))


def test_sampling_keeps_to_the_likeliest_tokens_whose_sum_reaches_p():
    # Probabilities 0.4, 0.3, 0.2, 0.1: top-k 3 leaves three, top-p 0.65 of the whole two of them.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(512, 4).contiguous()
    draw = torch_default("sample", {"logits": logits, "top_k": 3, "top_p": 0.65})
    torch.manual_seed(0)
    assert set(draw().flatten().tolist()) == {1, 3}
    only_k = torch_default("sample", {"logits": logits, "top_k": 3, "top_p": 1.0})
    assert set(only_k().flatten().tolist()) == {1, 2, 3}


def test_an_op_without_a_baseline_has_none():
    assert torch_default("moe", {}) is None
