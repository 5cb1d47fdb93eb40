"""The ops by products of matrices, in torch: what transformers runs where no other package is installed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero_linear_attention.ops import run_conv, run_delta, run_scan
from layerzero_linear_attention.recurrence import chunked


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks of 64 tokens."""
    return run_delta(chunked, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


kimi_delta_attention = gated_delta_rule


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2 in chunks of 64 tokens."""
    return run_scan(chunked, x, dt, A, B, C, D, dt_bias, initial_state, cu_seqlens, dt_softplus, dt_min, dt_max)


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
