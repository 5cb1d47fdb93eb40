"""The ops by products of matrices, in torch: what transformers runs where no other package is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero_linear_attention.ops import run_conv, run_delta, run_scan
from layerzero_linear_attention.recurrence import chunked


def gated_delta_rule(*given: Any) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks of 64 tokens."""
    return run_delta(chunked, *given)


kimi_delta_attention = gated_delta_rule


def mamba2_scan(*given: Any) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2 in chunks of 64 tokens."""
    return run_scan(chunked, *given)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """torch's own convolution, a group for each channel."""
    return run_conv(_grouped, x, weight, bias, initial_state, cu_seqlens, activation)


def _grouped(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(columns.dtype, weight.dtype)
    dtype = torch.float32 if dtype == torch.float16 else dtype  # on GPUs the gradient of the taps is off in float16
    bias = None if bias is None else bias.to(dtype)
    return F.conv1d(columns.to(dtype), weight.to(dtype).unsqueeze(1), bias, groups=weight.shape[0])
