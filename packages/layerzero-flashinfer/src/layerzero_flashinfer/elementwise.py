"""Norms and gated activations.

FlashInfer's fused add-and-norm writes into both of its inputs, which belong to the caller here. Two copies first would
move twice the bytes, so the sum is torch's and the norm FlashInfer's: one write and one read more than a fused kernel,
and the norm is taken of the sum as it was rounded, which is what the op says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero_flashinfer.vendor import lib


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One row a block; the weight has the dtype of the rows."""
    if x.ndim == 2:
        return lib().rmsnorm(x, weight, eps)  # type: ignore[no-any-return]
    return lib().rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)  # type: ignore[no-any-return]


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight counts as its distance from one."""
    if x.ndim == 2:
        return lib().gemma_rmsnorm(x, weight, eps)  # type: ignore[no-any-return]
    return lib().gemma_rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)  # type: ignore[no-any-return]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum by torch, its norm by FlashInfer."""
    total = torch.add(x, residual)
    return rms_norm(total, weight, eps), total


def gemma_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum by torch, its norm by FlashInfer."""
    total = torch.add(x, residual)
    return gemma_rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half."""
    return lib().silu_and_mul(x)  # type: ignore[no-any-return]


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """gelu(first half) * second half; "none" is the exact one, "tanh" its approximation."""
    found = lib().gelu_tanh_and_mul(x) if approximate == "tanh" else lib().gelu_and_mul(x)
    return found  # type: ignore[no-any-return]
