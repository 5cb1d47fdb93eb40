"""`lz.gemma_rms_norm`, `lz.gemma_add_rms_norm`: RMSNorm whose stored weight is the distance from one."""

from __future__ import annotations

from torch import Tensor

from layerzero._ops.norm import norm_op
from layerzero._ops.signature import dispatch
from layerzero.model.cost import Roofline


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (1 + weight) over the last axis, as in Gemma; returned in x's dtype.

    1 + weight and the product are taken in float32 and rounded once, at the end. (Llama rounds the normalised row to
    x's dtype before its weight; `lz.rms_norm` rounds once as well.) x and weight may differ in dtype.
    """
    return dispatch(GEMMA_RMS_NORM, (x, weight, eps), backend=backend)  # type: ignore[no-any-return]


def gemma_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(gemma_rms_norm(x + residual), x + residual): the norm of a residual stream and the new stream.

    The sum is rounded to the dtype of `residual` and the norm taken of that, so the pair equals the two ops apart.
    """
    return dispatch(GEMMA_ADD_RMS_NORM, (x, residual, weight, eps), backend=backend)  # type: ignore[no-any-return]


GEMMA_RMS_NORM = norm_op(
    gemma_rms_norm, Roofline("element_bytes * hidden * (2 * rows + 1)", "5 * rows * hidden"), "weight", optional=False
)
GEMMA_ADD_RMS_NORM = norm_op(
    gemma_add_rms_norm,
    Roofline("element_bytes * hidden * (4 * rows + 1)", "6 * rows * hidden"),
    "residual",
    "weight",
    optional=False,
)
