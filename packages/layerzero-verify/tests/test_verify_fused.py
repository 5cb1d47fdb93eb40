"""The ladder and a kernel that adds and norms in one step: its gradients are judged at the op's borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero_verify.block import CONFIGS
from layerzero_verify.layers import check_layer
from layerzero_verify.lineup import LineUp
from layerzero_verify.report import Status

FUSED = "toy.add_rms_norm.fused"


class AddRmsNorm(torch.autograd.Function):
    """One node of the graph for sum and norm, as compiled kernels are; `share` falsifies the residual's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, share: float) -> Any:
        stream = x + residual
        scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(stream, scale, weight)
        ctx.share = share
        return stream * scale * weight, stream

    @staticmethod
    def backward(ctx: Any, normed: Tensor, passed: Tensor) -> Any:
        stream, scale, weight = ctx.saved_tensors
        inner = normed * weight
        grad = scale * (inner - stream * scale.square() * (inner * stream).mean(-1, keepdim=True)) + passed
        return grad, grad * ctx.share, (normed * stream * scale).sum((0, 1)), None, None


def checks(lab: Any, share: float) -> Any:
    def kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return AddRmsNorm.apply(x, residual, weight, eps, share)

    lab.use(lab.kernel(FUSED, function=kernel))
    found = list(check_layer(CONFIGS["tiny"], LineUp("toy", (FUSED,)), torch.device("cpu")))
    assert any(row.kernel == FUSED for row in found[1].stages), "the kernel had its turn"
    return found


@pytest.mark.req("R-PAR-03")
def test_a_fused_kernel_that_is_right_passes(lab: Any) -> None:
    assert [str(check) for check in checks(lab, 1.0) if check.status is not Status.OK] == []


@pytest.mark.req("R-PAR-03")
def test_a_fused_kernel_with_a_wrong_gradient_is_found(lab: Any) -> None:
    _, backward, *_ = checks(lab, 1.01)
    assert backward.status is Status.FAIL and backward.name == "backward"
    assert {row.stage for row in backward.stages if not row.ok} >= {"input"}
