"""`lz.explain(model, inputs)`: each call of a model with its part, the kernel that ran, and the reasons."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.errors import InvalidInputError


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return lz.rms_norm(x, self.weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(x)[:, None]
        return x + lz.attention(q, q, q)[:, 0]


def test_parts_kernels_and_counts_are_those_that_ran(lab) -> None:
    lab.use(lab.kernel("alpha.rms_norm.x"), only=True)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    x = torch.randn(2, 4, 16)
    model(x)  # hot already: it is looked at all the same
    lab.clear()
    report = lz.explain(model, x)
    ran = lab.ran()
    assert [(call.part, call.report.op, call.ran, call.count) for call in report.calls] == [
        ("*.norm", "rms_norm", "alpha.rms_norm.x", 3),
        ("*", "attention", "reference.attention.plain", 3),
    ]
    assert report.kernels == {kernel: ran.count(kernel) for kernel in report.kernels}
    assert report.calls[0].report.context.dim("rows") == 8
    assert all(call.report.chosen == call.ran for call in report.calls)
    assert "*.norm: rms_norm rows=8" in str(report) and "3 × alpha.rms_norm.x  ranked by priority" in str(report)
    assert json.loads(json.dumps(report.to_json()))["calls"][1]["part"] == "*"


def test_inputs_may_be_named_or_several_and_a_function_will_do(lab) -> None:
    lab.use(lab.kernel("alpha.rms_norm.x"), only=True)
    x, weight = torch.randn(4, 16), torch.ones(16)
    for inputs in ((x, weight), {"x": x, "weight": weight}):
        (call,) = lz.explain(lambda x, weight: lz.rms_norm(x, weight), inputs).calls
        assert (call.part, call.ran, call.count) == ("", "alpha.rms_norm.x", 1)


def test_a_model_that_calls_no_op_is_told_about_patching() -> None:
    assert "lz.patch(model)" in str(lz.explain(nn.Linear(4, 4), torch.ones(1, 4)))


def test_what_the_model_raises_comes_through_and_nothing_stays_behind(lab) -> None:
    lab.use(lab.kernel("alpha.rms_norm.x"), only=True)
    model = nn.Sequential(Layer())
    with pytest.raises(InvalidInputError):
        lz.explain(model, torch.randn(2, 4, 17))
    model(torch.randn(2, 4, 16))
    lab.clear()
    model(torch.randn(2, 4, 16))
    assert lab.ran() == ["alpha.rms_norm.x", "reference.attention.plain"]
