"""The feed-forward block on torch's own products: two calls of the BLAS and the activation between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.backends.reference import feed_forward as reference


def narrow_on_cpu(x: Tensor) -> bool:
    """Whether x is of 16 bits and on a CPU, most of which multiply such numbers slower than wide ones."""
    return x.is_cpu and x.dtype.itemsize == 2


def mlp(x: Tensor, *rest: Any) -> Tensor:
    """`F.linear`, activation, `F.linear`.

    On a CPU 16-bit numbers are widened first, so that nothing is rounded between the two products: with it some
    results would leave the bounds. On a GPU what stands between them is rounded to the dtype of x, as everywhere.
    """
    return reference.mlp(x, *rest) if narrow_on_cpu(x) else reference.feed_forward(x, *rest)
