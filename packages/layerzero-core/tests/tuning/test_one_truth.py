"""One truth for every judge: the op's own formula where it has one, else its reference, on numbers in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layerzero._ops.signature import PUBLIC
from layerzero.tuning.truth import truth


def test_the_reference_is_computed_in_float64_from_the_numbers_as_they_were_rounded():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    found = truth(PUBLIC["rms_norm"], (x, weight, 1e-6))
    wide = x.double()
    want = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert found.dtype is torch.float64 and torch.allclose(found, want, rtol=1e-12, atol=0.0)


def test_an_op_with_a_formula_of_its_own_is_held_to_that():
    op = dataclasses.replace(PUBLIC["rms_norm"], truth=lambda x, weight, eps: x * 3)
    x = torch.randn(2, 8)
    assert torch.equal(truth(op, (x, None, 1e-6)), x.double() * 3)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_a_conversion_is_defined_on_the_numbers_as_they_are_given(target):
    x = torch.randn(64)
    found = truth(PUBLIC["cast"], (x, target, False))
    assert found.dtype is target and torch.equal(found, x.to(target))
