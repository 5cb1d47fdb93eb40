"""How far each rung of the ladder may lie from the truth, in float32.

Level 1 uses the tolerance table of `layerzero.numerics`, never looser than KERNEL in float32. In a narrower dtype no
fixed number is right for a whole layer or model: there the bound is the float32 one plus twice the rounding error that
the plain torch computation itself makes in that dtype, measured on the spot.
"""

from __future__ import annotations

from dataclasses import replace

from layerzero.numerics import Tolerance, tolerance
from layerzero.numerics.tolerances import dtype_name

KERNEL = 1e-5  # one kernel's output
LAYER = 1e-4  # every stage of a layer
LOGITS = 1e-3  # a whole model's logits
GRADS = 1e-5  # gradients after one step
WEIGHTS = 1e-3  # weights after several steps
EMBEDDING_GRAD = 1e-2  # the token embedding's gradient, a sum over all layers

# steps, bound on the weights, bound on the loss; beyond the last one the two curves are compared
TRAINING = ((1, 1e-5, 1e-5), (5, 1e-3, 1e-2), (20, 1e-2, 1e-1))

BUG = 1.0  # an absolute difference above this is a mistake, not rounding
FAR_WORSE = 100.0  # times the median of its neighbours: that one component is at fault


def limit(threshold: float, own_error: float = 0.0) -> Tolerance:
    """A rung's threshold as bounds; `own_error` is what plain torch itself is off by in the dtype at hand."""
    room = threshold + 2.0 * own_error
    return Tolerance(rtol=room, atol=room)


def kernel(op: str, dtype: str, *, k: int | None = None, declared: float = 0.0) -> Tolerance:
    """Bounds of one kernel's result: the table's, or the error the kernel declares where that is larger."""
    row = tolerance(op, dtype, k=k)
    rtol, atol = row.rtol, row.atol
    if dtype_name(dtype) == "float32" and not row.exact:
        rtol, atol = min(rtol, KERNEL), min(atol, KERNEL)
    return replace(row, rtol=max(rtol, declared), atol=max(atol, declared))


def gradient(op: str, dtype: str, largest: float, *, declared: float = 0.0) -> Tolerance:
    """Bounds of a gradient, a sum over everything it touched: the absolute bound goes with its largest element."""
    name = dtype_name(dtype)
    row = tolerance(op, dtype)
    # An op that copies has exact results, but its gradient is a sum all the same.
    base = tolerance("gradient", dtype) if row.exact else row
    rtol = max(GRADS if name == "float32" else base.rtol, declared)
    return replace(base, rtol=rtol, atol=rtol * max(1.0, largest))
