"""Canaries: a new kernel runs in shadow on a share of the calls and is chosen only after it agreed often enough."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.dispatch.canary import trials
from layerzero.errors import PolicyValidationError
from layerzero.numerics.tolerances import tolerance
from layerzero.runtime.state import state

X, W = torch.linspace(-1, 1, 24).reshape(3, 8), torch.ones(8)
NEW, OLD = "new.rms_norm.fast", "old.rms_norm.plain"


def setting(calls: int = 3, fraction: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"canary": {"kernels": ["new"], "fraction": fraction, "calls": calls}, **more}


def start(lab: Any, function: Any = None, **canary: Any) -> None:
    lab.use(lab.kernel(NEW, function, priority=95), lab.kernel(OLD, priority=90), **setting(**canary))


def reasons(kernel: str = NEW) -> list[str]:
    return [item.code.value for item in lz.explain("rms_norm", X, W).decision.candidate(kernel).reasons]


def test_a_canary_runs_beside_the_kernel_in_charge_until_it_is_promoted(lab: Any, caplog: Any) -> None:
    start(lab, calls=3, fraction=0.5)
    assert lz.which("rms_norm", X, W) == OLD and reasons() == ["CANARY_SHADOW"]
    assert lz.explain("rms_norm", X, W).decision.shadow == (NEW,)
    lab.clear()
    seen = []
    with caplog.at_level(logging.WARNING, logger="layerzero.health"):
        for _ in range(6):
            out, ran = lab.run(lz.rms_norm, X, W)
            seen.append(ran)
            torch.testing.assert_close(out, torch.rms_norm(X, (8,), W, 1e-6))
    assert seen == [[OLD], [OLD, NEW]] * 3  # every other call, beside the one in charge
    assert "is promoted after 3 good comparisons" in caplog.text
    assert lab.run(lz.rms_norm, X, W)[1] == [NEW] and reasons() == []
    assert state.world.trials == {NEW: ""} and not trials()
    assert [c.message for c in lz.doctor(probe=False).checks if c.name == f"canary {NEW}"] == ["promoted"]


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (lambda x, weight, eps: torch.rms_norm(x, (8,), weight, eps) * 1.01, "NUMERICS_MISMATCH"),
        (lambda x, weight, eps: torch.rms_norm(x, (8,), weight, eps)[:2], "NUMERICS_MISMATCH"),
        (lambda x, weight, eps: 1 / 0, "KERNEL_RAISED"),
    ],
    ids=["wrong", "wrong_shape", "raises"],
)
def test_one_bad_answer_ends_the_trial_and_no_caller_sees_it(lab: Any, function: Any, code: str, caplog: Any) -> None:
    start(lab, function, calls=3, fraction=1.0)
    with caplog.at_level(logging.ERROR, logger="layerzero.health"):
        for _ in range(4):
            torch.testing.assert_close(lz.rms_norm(X, W), torch.rms_norm(X, (8,), W, 1e-6))
    assert reasons() == ["CANARY_FAILED"] and code in state.world.trials[NEW]
    assert lab.tries.count(NEW) == 1 and "has failed its trial" in caplog.text
    assert not state.health.snapshot().kernels  # nobody's breaker was charged
    assert any(c.code == "CANARY_FAILED" for c in lz.doctor(probe=False).checks)


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("function", "seen", "allowed"),
    [
        (
            lambda out: out * 1e3,
            "first -1381.93 instead of -1.38193 at [0, 0], 100.00% of the elements out of bounds",
            "+",
        ),
        (lambda out: out.masked_fill(out > 0, float("nan")), "NaN in other places (12 elements)", "+"),
        (lambda out: out[:2], "shape [2, 8]", "shape [3, 8]"),
    ],
    ids=["wrong", "nan", "shape"],
)
def test_the_failure_says_what_was_seen_and_what_was_allowed(lab: Any, function: Any, seen: str, allowed: str) -> None:
    start(lab, lambda x, weight, eps: function(torch.rms_norm(x, (8,), weight, eps)), calls=3, fraction=1.0)
    lz.rms_norm(X, W)
    message = state.world.trials[NEW]
    tol = tolerance("rms_norm", torch.float32)
    said, _, bound = message.partition(", allowed ")
    assert seen in said, message
    assert bound.startswith(f"{tol.atol:g} + {tol.rtol:g} of the value" if allowed == "+" else allowed), message
    assert "times the tolerance" not in message


def test_where_the_two_differ_the_reference_says_who_is_wrong(lab: Any) -> None:
    def off(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, (8,), weight, eps) * 1.01

    lab.use(lab.kernel(NEW, priority=95), lab.kernel(OLD, off, priority=90), **setting(calls=2, fraction=1.0))
    for _ in range(2):
        lz.rms_norm(X, W)
    assert state.world.trials == {NEW: ""}  # the kernel in charge was the wrong one


def test_a_canary_asked_for_by_name_or_lock_runs_at_once(lab: Any) -> None:
    start(lab)
    assert lab.run(lz.rms_norm, X, W, backend="new")[1] == [NEW]
    lz.lock("rms_norm", NEW)
    assert lab.run(lz.rms_norm, X, W)[1] == [NEW]


def test_a_canary_that_would_not_be_chosen_is_not_run(lab: Any) -> None:
    lab.use(lab.kernel(NEW, priority=10), lab.kernel(OLD, priority=90), **setting(fraction=1.0))
    assert lz.explain("rms_norm", X, W).decision.shadow == ()
    lz.rms_norm(X, W)
    assert lab.tries == [OLD]


def test_what_writes_in_place_or_draws_numbers_has_no_shadow(lab: Any) -> None:
    lab.use(
        lab.kernel("new.rope.x", priority=95), lab.kernel("new.sample_topk.x", priority=95), **setting(fraction=1.0)
    )
    q, k, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.ones(3, 4), torch.zeros(3, 4)
    lz.rope(q, k, cos, sin, inplace=True)
    assert "new.rope.x" not in lab.tries
    lz.rope(q, k, cos, sin)
    assert "new.rope.x" in lab.tries
    logits = torch.randn(4, 50)
    torch.manual_seed(5)
    first = lz.sample_topk(logits, 5)
    torch.manual_seed(5)
    assert torch.equal(first, lz.sample_topk(logits, 5)) and "new.sample_topk.x" not in lab.tries


def test_gradients_come_from_the_kernel_in_charge(lab: Any) -> None:
    start(lab, calls=100, fraction=1.0)
    leaf = X.clone().requires_grad_()
    lz.rms_norm(leaf, W).square().sum().backward()
    twin = X.clone().requires_grad_()
    torch.rms_norm(twin, (8,), W, 1e-6).square().sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad)
    assert NEW in lab.tries


@pytest.mark.parametrize(
    "wrong", [{"fraction": 0.0}, {"fraction": 1.5}, {"fraction": True}, {"calls": 0}, {"kernel": ["x"]}]
)
def test_wrong_settings_are_refused_in_code_and_in_files(lab: Any, wrong: dict[str, Any], tmp_path: Any) -> None:
    from layerzero.policy.load import from_mapping

    with pytest.raises(PolicyValidationError):
        lz.configure(canary=wrong)
    with pytest.raises(PolicyValidationError):
        from_mapping({"canary": wrong})
    assert from_mapping({"canary": {"kernels": "new*", "fraction": 0.1}}).settings["canary"]["kernels"] == ("new*",)


def test_a_policy_without_a_canary_hashes_as_before(lab: Any) -> None:
    from layerzero.model.config import Policy

    assert Policy().policy_hash == Policy(canary={}).policy_hash  # type: ignore[arg-type]
    assert Policy().policy_hash != Policy(canary={"kernels": ("new",)}).policy_hash  # type: ignore[arg-type]
