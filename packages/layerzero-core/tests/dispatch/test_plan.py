"""`lz.plan`: bound once, called many times, and it still computes what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.errors import InvalidInputError, PlanMismatchError, UnknownNameError

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
X, W, B = torch.randn(3, 8), torch.rand(8), torch.rand(8)


def cases() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    angles = torch.rand(5, 4)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    batch = lz.paged_batch(tables, torch.tensor([3, 5], dtype=torch.int32))
    pages = torch.randn(4, 4, 2, 8)
    return {
        "attention": ("attention", (Q, K, K), {}),
        "attention options": ("attention", (Q, K, K), {"is_causal": "bottom_right", "scale": 0.3, "return_lse": True}),
        "attention mask": ("attention", (Q, K, K, torch.rand(5, 7) > 0.3), {}),
        "attention window": ("attention", (Q, K, K), {"window": 3, "softcap": 5.0}),
        "rms_norm": ("rms_norm", (X, W), {"eps": 0.5}),
        "rms_norm without weight": ("rms_norm", (X,), {}),
        "layer_norm": ("layer_norm", (X, W, B), {"eps": 0.5}),
        "rope": ("rope", (Q, None, angles.cos(), angles.sin()), {"interleaved": True}),
        "gelu_and_mul": ("gelu_and_mul", (X,), {"approximate": "tanh"}),
        "linear": ("linear", (X, torch.randn(5, 8)), {"activation": "relu"}),
        "paged_attention": ("paged_attention", (torch.randn(2, 4, 8), pages, pages, batch), {"scale": 0.2}),
    }


CASES = cases()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_computes_what_the_call_computes(lab: Any, name: str, check: bool) -> None:
    op, args, kwargs = CASES[name]
    wanted = getattr(lz, op)(*args, **kwargs)
    planned = lz.plan(op, *args, check=check, **kwargs)
    assert planned.kernel_id == lz.which(op, *args, **kwargs)
    assert list(planned.transforms) == lz.dry_run(op, *args, **kwargs).transforms
    assert planned.decision.op == op
    out, ran = lab.run(planned, *args, **kwargs)
    assert ran == [planned.kernel_id]
    torch.testing.assert_close(out, wanted)
    out, ran = lab.run(planned, *args)  # options left out are those of the plan
    assert ran == [planned.kernel_id]
    torch.testing.assert_close(out, wanted)


def test_other_values_of_the_same_kind_are_used(lab: Any) -> None:
    planned = lz.plan("attention", Q, K, K, alibi_slopes=torch.zeros(4), scale=0.1)
    slopes = torch.rand(4)
    wanted = lz.attention(Q + 1, K, K * 2, alibi_slopes=slopes, scale=0.7)
    torch.testing.assert_close(planned(Q + 1, K, K * 2, alibi_slopes=slopes, scale=0.7), wanted)
    normed = lz.plan("rms_norm", X, W, 1e-6, backend="reference")
    torch.testing.assert_close(normed(X * 3, B, 0.25, backend="reference"), lz.rms_norm(X * 3, B, 0.25))


def test_a_causal_bias_is_read_at_each_call(lab: Any) -> None:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(5, 7)
    planned = lz.plan("attention", Q, K, K, bias)
    torch.testing.assert_close(planned(Q, K, K, bias), lz.attention(Q, K, K, is_causal="bottom_right"))


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(2, 4, 6, 8), K, K),
        lambda: (Q.double(), K.double(), K.double()),
        lambda: (Q.transpose(1, 2).contiguous().transpose(1, 2), K, K),
        lambda: (Q.clone().requires_grad_(), K, K),
        lambda: (Q, K, K, torch.zeros(5, 7)),
    ],
)
def test_a_checked_plan_refuses_other_metadata(lab: Any, other: Any) -> None:
    planned = lz.plan("attention", Q, K, K, check=True)
    planned(Q, K, K)
    with pytest.raises(PlanMismatchError) as caught:
        planned(*other())
    assert caught.value.code == "PLAN_ARGUMENTS_CHANGED"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PlanMismatchError):
        planned(Q, K, K)
    with pytest.raises(PlanMismatchError):
        planned(Q, K, K, is_causal=True)


def test_the_debug_variable_checks_every_plan(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    planned = lz.plan("rms_norm", X, W)
    with pytest.raises(PlanMismatchError):
        planned(torch.randn(4, 8), W)


def test_a_plan_keeps_its_kernel_when_the_policy_changes(lab: Any) -> None:
    planned = lz.plan("rms_norm", X, W)
    lz.configure(deny=["torch"])
    assert lz.which("rms_norm", X, W) == "reference.rms_norm.plain"
    assert lab.run(planned, X, W)[1] == ["torch.rms_norm.native"]


def test_bad_plans_are_refused_when_they_are_made(lab: Any) -> None:
    with pytest.raises(UnknownNameError):
        lz.plan("attentoin", Q, K, K)
    with pytest.raises(InvalidInputError):
        lz.plan("attention", Q, K, torch.randn(2, 2, 6, 8))
    with pytest.raises(InvalidInputError):
        lz.plan("rms_norm")


def test_a_plan_that_adapts_still_adapts(lab: Any) -> None:
    q = Q.transpose(1, 2)
    k = K.transpose(1, 2)
    planned = lz.plan("attention", q, k, k, layout="BSHD", is_causal=True)
    assert planned.transforms
    torch.testing.assert_close(planned(q, k, k), lz.attention(q, k, k, layout="BSHD", is_causal=True))
    empty = lz.plan("attention", Q[:0], K[:0], K[:0])
    assert empty.kernel_id == "reference.attention.plain"
    assert empty(Q[:0], K[:0], K[:0]).shape == (0, 4, 5, 8)
